// The page: shows what model.js tells, and asks the broker for what is clicked.
const API = new URL("api/", document.baseURI);
const PERIOD = 0.5; // seconds between two looks
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

let token = sessionStorage.getItem("qflow-token");
const view = {
  queues: { filter: "", sort: "order", only: false, page: 0 },
  producers: { filter: "", sort: "order", only: false, page: 0 },
  selected: null,
};
const model = new Worker(new URL("model.js", import.meta.url), { type: "module" });
model.onmessage = ({ data }) => {
  if (data.kind === "view") show(data);
  else if (data.kind === "connected") connected();
  else if (data.kind === "lost") byId("connection").textContent = `not connected: ${data.why}`;
  else if (data.kind === "unauthorized") askForToken();
};
start();

function start() {
  model.postMessage({ kind: "start", token, period: PERIOD });
}

function connected() {
  byId("connection").textContent = `connected to ${location.host}`;
  notice(null);
}

function askForToken() {
  byId("connection").textContent = "not connected: a token is needed";
  const dialog = byId("login");
  if (!dialog.open) dialog.showModal();
}

byId("login").addEventListener("close", () => {
  const field = byId("login").querySelector("input");
  token = field.value.trim() || null;
  field.value = "";
  if (token !== null) sessionStorage.setItem("qflow-token", token);
  start();
});

function changeView() {
  model.postMessage({ kind: "view", view });
}

function notice(text) {
  const place = byId("notice");
  place.hidden = text === null;
  place.textContent = text ?? "";
}

// Asking.

class Refused extends Error {
  constructor(problem) {
    super(problem.detail);
    this.fields = (problem.errors ?? []).map((each) => each.field);
  }
}

async function ask(method, path, body) {
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(new URL(path, API), {
    method,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (response.status === 204) return null;
  const answer = await response.json();
  if (response.ok) return answer;
  if (response.status === 401) askForToken();
  throw new Refused(answer);
}

async function tryTo(button, work) {
  button.disabled = true;
  try {
    await work();
    notice(null);
  } catch (error) {
    notice(error.message);
  } finally {
    button.disabled = false;
    button.focus();
  }
}

for (const what of ["stop", "start"]) {
  const button = byId(`${what}-all`);
  button.addEventListener("click", () => tryTo(button, () => ask("POST", `producers/${what}`)));
}

// Theme.

const theme = byId("theme");
theme.value = localStorage.getItem("qflow-theme") ?? "auto";
function setTheme() {
  if (theme.value === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme.value;
  colours = readColours();
  chart.recolour();
  changeView();
}
theme.addEventListener("change", () => {
  localStorage.setItem("qflow-theme", theme.value);
  setTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", setTheme);

let colours = readColours();
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return { text: read("text"), soft: read("soft"), line: read("line"), accent: read("accent"), on: read("on"), onBack: read("on-back"), off: read("off") };
}

// Showing.

const number = new Intl.NumberFormat("en");
const whole = (value) => number.format(Math.round(value));
const seconds = (value) => (value < 60 ? `${value.toFixed(1)} s` : `${whole(value)} s`);

function setText(element, text) {
  // What has not changed is not laid out again, and not read out again.
  const there = element.firstChild;
  if (there === null) element.textContent = text;
  else if (there.data !== text) there.data = text;
}

let drawsSparks = true;
let drawsChart = true;

function show(told) {
  performance.mark("show");
  // What is scrolled away is not drawn. Asked before anything is written: afterwards it would take a layout.
  const isSeen = (id) => byId(id).firstElementChild.checkVisibility({ contentVisibilityAuto: true });
  drawsSparks = isSeen("queues");
  drawsChart = isSeen("detail");
  showCounters(told.counters);
  showPressed(told.producersStopped);
  showPage("queue", told.queues, makeQueueRow, fillQueueRow);
  showPage("producer", told.producers, makeProducerRow, fillProducerRow);
  showDetail(told.detail);
  if (told.graph !== null) showGraph(told.graph);
  if (told.news.length) setText(byId("announcer"), told.news.slice(0, 3).join(". "));
  performance.measure("qflow-update", "show");
}

function showPressed(stopped) {
  byId("stop-all").setAttribute("aria-pressed", String(stopped));
}

function showCounters(counters) {
  const list = byId("counters");
  while (list.children.length < counters.length) {
    const pair = document.createElement("div");
    pair.append(document.createElement("dt"), document.createElement("dd"));
    list.append(pair);
  }
  counters.forEach(([name, value], index) => {
    const [term, data] = list.children[index].children;
    setText(term, name);
    setText(data, number.format(value));
  });
}

function showPage(kind, told, make, fill) {
  const body = byId(`${kind}-rows`);
  while (body.children.length < told.rows.length) body.append(make());
  while (body.children.length > told.rows.length) body.lastElementChild.remove();
  told.rows.forEach((row, index) => fill(body.children[index], row));
  showPages(kind, told);
}

function showPages(kind, told) {
  const nav = byId(`${kind}-pages`);
  if (!nav.children.length) {
    const [before, where, after] = [document.createElement("button"), document.createElement("span"), document.createElement("button")];
    for (const [button, step, words] of [[before, -1, "Previous page"], [after, 1, "Next page"]]) {
      button.type = "button";
      button.className = "small";
      button.textContent = words;
      button.addEventListener("click", () => {
        view[`${kind}s`].page = Number(nav.dataset.page) + step;
        changeView();
      });
    }
    nav.append(before, where, after);
  }
  nav.dataset.page = told.page;
  const [before, where, after] = nav.children;
  before.disabled = told.page === 0;
  after.disabled = told.page >= told.pages - 1;
  const those = told.count === told.of ? number.format(told.of) : `${number.format(told.count)} of ${number.format(told.of)}`;
  setText(where, `page ${told.page + 1} of ${told.pages}, ${those} ${kind}${told.of === 1 ? "" : "s"}`);
}

function cells(row, count, numbers) {
  const header = document.createElement("th");
  header.scope = "row";
  row.append(header);
  for (let index = 1; index < count; index++) {
    const cell = document.createElement("td");
    if (numbers.includes(index)) cell.className = "number";
    row.append(cell);
  }
  return row.children;
}

function makeQueueRow() {
  const row = document.createElement("tr");
  const made = cells(row, 10, [2, 3, 4, 5, 6, 7, 8]);
  const button = document.createElement("button");
  button.type = "button";
  button.className = "link";
  button.append("");
  button.addEventListener("click", () => select(row.dataset.name, true));
  made[0].append(button);
  made[1].className = "state";
  const canvas = document.createElement("canvas");
  canvas.width = 240;
  canvas.height = 52;
  canvas.setAttribute("aria-hidden", "true");
  made[9].append(canvas);
  return row;
}

function fillQueueRow(row, told) {
  const made = row.children;
  row.dataset.name = told.name;
  setText(made[0].firstChild, told.name);
  setText(made[1], told.on ? "ON" : "OFF");
  made[1].classList.toggle("on", told.on);
  [told.depth, told.bytes, told.rateIn, told.rateOut, told.timesOn, told.flows, told.consumers].forEach((value, index) =>
    setText(made[index + 2], whole(value)),
  );
  if (drawsSparks) drawSpark(made[9].firstChild, told);
}

function drawSpark(canvas, told) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  context.clearRect(0, 0, width, height);
  let most = told.stop * 1.1 || 1;
  for (const value of told.values) if (value > most) most = value;
  const x = (index) => width - 2 * (told.values.length - index);
  const y = (value) => height - 2 - (value / most) * (height - 4);
  context.fillStyle = colours.onBack;
  told.onAt.forEach((on, index) => on && context.fillRect(x(index) - 1, 0, 2, height));
  if (told.stop) {
    for (const [value, colour] of [[told.stop, colours.on], [told.resume, colours.off]]) {
      context.strokeStyle = colour;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(0, y(value));
      context.lineTo(width, y(value));
      context.stroke();
    }
  }
  context.strokeStyle = colours.accent;
  context.lineWidth = 2;
  context.beginPath();
  told.values.forEach((value, index) => value !== null && context.lineTo(x(index), y(value)));
  context.stroke();
}

function makeProducerRow() {
  const row = document.createElement("tr");
  const made = cells(row, 9, [3, 4, 5, 6, 7]);
  made[1].className = "state";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "small";
  button.addEventListener("click", () =>
    tryTo(button, () => ask("POST", `producers/${encodeURIComponent(row.dataset.name)}/${button.dataset.what}`)),
  );
  made[8].append(button);
  return row;
}

function fillProducerRow(row, told) {
  const made = row.children;
  row.dataset.name = told.name;
  const byOperator = told.blockedBy.includes("operator");
  setText(made[0], told.name);
  setText(made[1], told.flowed ? "flowed" : "unflowed");
  made[1].classList.toggle("on", told.flowed && !byOperator);
  made[1].classList.toggle("operator", byOperator);
  const held = told.blockedBy.slice(0, 3).join(", ") + (told.blockedBy.length > 3 ? ` and ${told.blockedBy.length - 3} more` : "");
  setText(made[2], (held || "–") + (told.flowOk ? "" : " (not answered)"));
  setText(made[3], whole(told.times));
  setText(made[4], seconds(told.seconds));
  setText(made[5], whole(told.published));
  setText(made[6], whole(told.rate));
  setText(made[7], whole(told.unconfirmed));
  const button = made[8].firstChild;
  button.dataset.what = byOperator ? "start" : "stop";
  setText(button, byOperator ? "Start" : "Stop");
  button.setAttribute("aria-label", `${byOperator ? "Start" : "Stop"} producer ${told.name}`);
}

for (const kind of ["queue", "producer"]) {
  const form = byId(`${kind}-filter`);
  const change = () => {
    const { filter, sort, only } = form.elements;
    Object.assign(view[`${kind}s`], { filter: filter.value, sort: sort.value, only: only.checked, page: 0 });
    changeView();
  };
  form.addEventListener("input", change);
  form.addEventListener("submit", (event) => event.preventDefault());
}

// One queue.

const thresholds = byId("thresholds");
const inputs = [...thresholds.querySelectorAll("input")];
const edited = new Set(); // what somebody is typing is not written over

function select(name, move) {
  view.selected = name;
  edited.clear();
  setAnswer("", []);
  changeView();
  if (move) {
    byId("detail").hidden = false;
    setText(byId("detail-title"), `Queue ${name}`);
    byId("detail-title").focus();
  }
}

function showDetail(told) {
  const section = byId("detail");
  section.hidden = told === null;
  if (told === null) return;
  setText(byId("detail-title"), `Queue ${told.name}`);
  const marks = told.stop ? `, ON above ${whole(told.stop)}, OFF below ${whole(told.resume)} ${told.unit}` : ", no marks";
  const held = told.heldConfirms ? `, holds ${whole(told.heldConfirms)} confirms` : "";
  setText(
    byId("detail-words"),
    `${told.on ? "ON" : "OFF"} at ${whole(told.depth)} messages, ${whole(told.bytes)} bytes${marks}; turned ON ${whole(told.timesOn)} times; flows ${whole(told.blocked)} producers${held}.`,
  );
  for (const field of inputs) {
    const value = String(told.thresholds[field.name]);
    if (!edited.has(field) && field.value !== value) field.value = value;
  }
  chart.show(told);
}

thresholds.addEventListener("input", (event) => edited.add(event.target));
thresholds.addEventListener("submit", async (event) => {
  event.preventDefault();
  // Only what was edited: the others may have been changed by somebody else.
  const queue = view.selected;
  const sent = new Map([...edited].map((field) => [field, field.value]));
  const body = {};
  for (const [field, value] of sent) {
    if (value !== "") body[field.name] = Number(value);
    else body[field.name] = field.name.includes("Resume") ? null : 0;
  }
  const button = thresholds.querySelector("button");
  button.disabled = true;
  try {
    await ask("PATCH", `queues/${encodeURIComponent(queue)}/thresholds`, body);
    if (view.selected !== queue) return;
    // What was typed while the answer was on its way is not sent yet.
    for (const [field, value] of sent) if (field.value === value) edited.delete(field);
    setAnswer("The thresholds are in force.", []);
  } catch (error) {
    if (view.selected === queue) setAnswer(error.message, error.fields ?? []);
  } finally {
    button.disabled = false;
    if (document.activeElement === document.body) button.focus();
  }
});

function setAnswer(text, fields) {
  const answer = byId("thresholds-answer");
  answer.classList.toggle("wrong", fields.length > 0);
  setText(answer, text);
  for (const field of inputs) {
    if (fields.includes(field.name)) {
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-describedby", "thresholds-answer");
    } else {
      field.removeAttribute("aria-invalid");
      field.removeAttribute("aria-describedby");
    }
  }
  if (fields.length) thresholds.elements[fields[0]]?.focus();
}

byId("purge").addEventListener("click", (event) =>
  tryTo(event.currentTarget, () => ask("POST", `queues/${encodeURIComponent(view.selected)}/purge`)),
);

const chart = {
  plot: null,
  told: null,
  make() {
    const place = byId("chart");
    const line = (label, stroke, extra = {}) => ({ label, stroke, width: 2, spanGaps: true, points: { show: false }, ...extra });
    const axis = { stroke: () => colours.text, grid: { stroke: () => colours.line, width: 1 }, ticks: { stroke: () => colours.line } };
    const options = {
      width: Math.max(300, place.clientWidth),
      height: 260,
      cursor: { drag: { setScale: false } },
      scales: { y: { range: (_plot, _least, most) => [0, Math.max(1, most * 1.05)] } },
      axes: [axis, { ...axis, size: 70 }],
      series: [
        {},
        line("depth", () => colours.accent, { value: (_plot, value) => (value === null ? "–" : whole(value)) }),
        line("ON above", () => colours.on, { dash: [8, 4] }),
        line("OFF below", () => colours.off, { dash: [2, 4] }),
      ],
      hooks: { drawClear: [(plot) => this.shade(plot)] },
    };
    this.plot = new uPlot(options, this.data(), place);
  },
  data() {
    const { times, values, stop, resume } = this.told;
    const flat = (value) => times.map(() => value || null);
    return [times, values, flat(stop), flat(resume)];
  },
  shade(plot) {
    const { times, onAt } = this.told;
    plot.ctx.fillStyle = colours.onBack;
    for (let first = 0; first < times.length; first++) {
      if (!onAt[first]) continue;
      // From the first look at which it was ON to the first at which it was not.
      let last = first;
      while (last + 1 < times.length && onAt[last]) last++;
      const left = plot.valToPos(times[first], "x", true);
      plot.ctx.fillRect(left, plot.bbox.top, Math.max(1, plot.valToPos(times[last], "x", true) - left), plot.bbox.height);
      first = last;
    }
  },
  show(told) {
    this.told = told;
    if (this.plot === null) this.make();
    else if (drawsChart) this.plot.setData(this.data());
  },
  recolour() {
    // Its legend keeps the colours that it was made with.
    this.plot?.destroy();
    this.plot = null;
    if (this.told !== null) this.make();
  },
};

new ResizeObserver(() => {
  const width = Math.max(300, byId("chart").clientWidth);
  if (chart.plot !== null && width !== chart.plot.width) chart.plot.setSize({ width, height: 260 });
}).observe(byId("chart"));

// The graph.

let drawn = { key: null, nodes: new Map(), edges: new Map() };

function svg(name, attributes = {}) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function showGraph(told) {
  const picture = byId("graph");
  setText(byId("graph-words"), told.words + (told.rest ? ` Not drawn: ${told.rest}.` : ""));
  if (told.key !== drawn.key) {
    drawn = { key: told.key, nodes: new Map(), edges: new Map() };
    picture.setAttribute("width", Math.ceil(told.width));
    picture.setAttribute("height", Math.ceil(told.height));
    const parts = [];
    for (const edge of told.edges) {
      const path = svg("path", { d: curve(edge.points) });
      drawn.edges.set(edge.id, path);
      parts.push(path);
    }
    for (const node of told.nodes) {
      const group = svg("g", { transform: `translate(${node.x} ${node.y})` });
      const label = svg("text", { x: 8, y: node.sub ? 16 : 24 });
      const sub = svg("text", { x: 8, y: 32, class: "sub" });
      const title = svg("title");
      group.append(title, svg("rect", { width: node.width, height: node.height, rx: node.kind === "exchange" ? 20 : 5 }), label, sub);
      label.textContent = clip(node.label);
      title.textContent = node.label;
      if (node.kind === "queue") group.addEventListener("click", () => select(node.label, true));
      drawn.nodes.set(node.id, { group, sub });
      parts.push(group);
    }
    picture.replaceChildren(...parts);
  }
  for (const edge of told.edges) setClass(drawn.edges.get(edge.id), `edge ${edge.state}`);
  for (const node of told.nodes) {
    const { group, sub } = drawn.nodes.get(node.id);
    setClass(group, `node ${node.state}${node.kind === "queue" ? " pick" : ""}`);
    setText(sub, clip(node.sub));
  }
}

function setClass(element, name) {
  if (element.getAttribute("class") !== name) element.setAttribute("class", name);
}

function clip(text) {
  return text.length > 26 ? `${text.slice(0, 25)}…` : text;
}

function curve(points) {
  const [first, ...rest] = points;
  let path = `M${first.x} ${first.y}`;
  for (let index = 0; index + 1 < rest.length; index++) {
    const [control, next] = [rest[index], rest[index + 1]];
    const end = index + 2 === rest.length ? next : { x: (control.x + next.x) / 2, y: (control.y + next.y) / 2 };
    path += ` Q${control.x} ${control.y} ${end.x} ${end.y}`;
  }
  return rest.length === 1 ? `${path} L${rest[0].x} ${rest[0].y}` : path;
}

setTheme();
