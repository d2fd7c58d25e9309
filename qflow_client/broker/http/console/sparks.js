// Draws the sparklines: the last minute of each queue in the table. All sparklines are on one canvas.
const WIDTH = 240, ROW = 64, HEIGHT = 52;

export function drawSparks(canvas, colours, all) {
  // Setting the size of a canvas also clears it.
  const context = canvas.getContext("2d");
  if (canvas.width !== WIDTH || canvas.height !== ROW * all.length) {
    canvas.width = WIDTH;
    canvas.height = ROW * all.length;
  } else {
    context.clearRect(0, 0, canvas.width, canvas.height);
  }
  all.forEach((told, index) => {
    context.setTransform(1, 0, 0, 1, 0, ROW * index + (ROW - HEIGHT) / 2);
    drawSpark(context, colours, told);
  });
  context.setTransform(1, 0, 0, 1, 0, 0);
}

function drawSpark(context, colours, told) {
  let most = told.stop * 1.1 || 1;
  for (const value of told.values) if (value > most) most = value;
  const x = (index) => WIDTH - 2 * (told.values.length - index);
  const y = (value) => HEIGHT - 2 - (value / most) * (HEIGHT - 4);
  context.fillStyle = colours.onBack;
  told.onAt.forEach((on, index) => on && context.fillRect(x(index) - 1, 0, 2, HEIGHT));
  if (told.stop) {
    for (const [value, colour] of [[told.stop, colours.on], [told.resume, colours.off]]) {
      context.strokeStyle = colour;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(0, y(value));
      context.lineTo(WIDTH, y(value));
      context.stroke();
    }
  }
  context.strokeStyle = colours.accent;
  context.lineWidth = 2;
  context.beginPath();
  told.values.forEach((value, index) => value !== null && context.lineTo(x(index), y(value)));
  context.stroke();
}
