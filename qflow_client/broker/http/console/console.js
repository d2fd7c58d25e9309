// The page. It shows the data that model.js sends, and sends requests to the broker for the buttons and forms.
import { number, whole } from "./words.js";

const API = new URL("api/", document.baseURI);
const PERIOD = 0.5; // seconds between two updates of the page
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

// Requests to the broker.

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
  model.postMessage({ kind: "colours", colours });
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

// Display of the data.

function setText(element, text) {
  // Unchanged text is left alone, so the browser does no layout, and a screen reader does not read it again.
  const there = element.firstChild;
  if (there === null) element.textContent = text;
  else if (there.data !== text) there.data = text;
}

// Set each box to the height of its text. If the height stays the same, a new text needs no layout outside the box.
const heights = new ResizeObserver((all) => {
  for (const { target, contentRect } of all) target.parentElement.style.height = `${contentRect.height}px`;
});
for (const id of ["graph-words", "detail-words"]) heights.observe(byId(id).firstElementChild);

function setWords(id, text) {
  setText(byId(id).firstElementChild, text);
}

function setClass(element, name) {
  if (element.getAttribute("class") !== name) element.setAttribute("class", name);
}

// model.js draws the sparklines on a canvas of the page. A browser without offscreen canvases shows no sparklines.
if (byId("sparks").transferControlToOffscreen) {
  const sparks = byId("sparks").transferControlToOffscreen();
  model.postMessage({ kind: "sparks", canvas: sparks }, [sparks]);
}
new ResizeObserver(([rows]) => {
  byId("sparks").style.height = `${rows.contentRect.height}px`;
}).observe(byId("queue-rows"));

// Draw the graph and the chart only while they are visible. The browser alone (`content-visibility`) would draw more.
const seen = new Set();
const watcher = new IntersectionObserver(
  (all) => {
    for (const { target, isIntersecting } of all) {
      if (isIntersecting) seen.add(target.id);
      else seen.delete(target.id);
    }
    draw();
  },
  { rootMargin: "100px" },
);
for (const id of ["graph", "chart"]) watcher.observe(byId(id));

// Each layout of a text creates garbage. So in each update, a table writes only one of its invisible rows, and the
// graph only one of its invisible nodes. In invisible rows, a screen reader or a search in the page finds values from a
// few seconds ago. A row gets the current values when it is scrolled into view.
const away = new WeakSet();
const sight = new IntersectionObserver((all) => {
  for (const { target, isIntersecting } of all) {
    if (isIntersecting) away.delete(target);
    else away.add(target);
  }
  showTables();
  drawn.isOld = true;
  draw();
});

function draw() {
  if (seen.has("graph")) showGraph();
  if (seen.has("chart")) chart.draw();
}

let updates = 0;
let shown = null; // the last message with data from model.js

function show(told) {
  performance.mark("show");
  shown = told;
  showCounters(told.counters);
  showPressed(told.producersStopped);
  showTables();
  showDetail(told.detail);
  if (told.graph !== null) tellGraph(told.graph);
  draw();
  if (told.news.length) setText(byId("announcer"), told.news.slice(0, 3).join(". "));
  performance.measure("qflow-update", "show");
  // The marks and measures are for performance tools. Delete them, because a page can be open for days.
  performance.clearMarks("show");
  if (++updates % 1000 === 0) performance.clearMeasures("qflow-update");
}

function showPressed(stopped) {
  setAttribute(byId("stop-all"), "aria-pressed", String(stopped));
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
    setText(data, value);
  });
}

function showTables() {
  showPage("queue", shown.queues, makeQueueRow, fillQueueRow);
  showPage("producer", shown.producers, makeProducerRow, fillProducerRow);
}

function showPage(kind, told, make, fill) {
  const body = byId(`${kind}-rows`);
  while (body.children.length < told.rows.length) body.append(make());
  while (body.children.length > told.rows.length) body.lastElementChild.remove();
  const turn = updates % told.rows.length;
  told.rows.forEach((told, index) => {
    const row = body.children[index];
    // An invisible row is written only in its turn, or if it has to show another object than before.
    if (index === turn || !away.has(row) || row.dataset.name !== told.name) fill(row, told);
  });
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
  setAttribute(nav, "data-page", String(told.page));
  const [before, where, after] = nav.children;
  before.disabled = told.page === 0;
  after.disabled = told.page >= told.pages - 1;
  const those = told.count === told.of ? number.format(told.of) : `${number.format(told.count)} of ${number.format(told.of)}`;
  setText(where, `page ${told.page + 1} of ${told.pages}, ${those} ${kind}${told.of === 1 ? "" : "s"}`);
}

// The size of a cell's box does not depend on its text. So a new text needs no layout outside the box.
function makeRow(kinds) {
  const row = document.createElement("tr");
  const header = document.createElement("th");
  header.scope = "row";
  row.append(header);
  for (const kind of kinds) {
    const cell = document.createElement("td");
    cell.className = kind;
    const box = document.createElement("div");
    box.className = "box";
    cell.append(box);
    row.append(cell);
  }
  row.append(document.createElement("td"));
  sight.observe(row);
  return row;
}

function fillRow(row, told, header) {
  if (row.dataset.name !== told.name) row.dataset.name = told.name;
  setText(header, told.label);
  setClass(row.children[1], `state ${told.state}`);
  told.cells.forEach((text, index) => setText(row.children[index + 1].firstChild, text));
}

function makeQueueRow() {
  const row = makeRow(["state", ...Array(7).fill("number")]);
  const button = document.createElement("button");
  button.type = "button";
  button.className = "link";
  button.addEventListener("click", () => select(row.dataset.name, true));
  row.children[0].append(button);
  return row;
}

function fillQueueRow(row, told) {
  fillRow(row, told, row.children[0].firstChild);
}

function makeProducerRow() {
  const row = makeRow(["state", "names", ...Array(5).fill("number")]);
  const button = document.createElement("button");
  button.type = "button";
  button.className = "small";
  button.addEventListener("click", () =>
    tryTo(button, () => ask("POST", `producers/${encodeURIComponent(row.dataset.name)}/${button.dataset.what}`)),
  );
  row.children[8].append(button);
  return row;
}

function fillProducerRow(row, told) {
  fillRow(row, told, row.children[0]);
  const button = row.children[8].firstChild;
  const what = told.state === "operator" ? "Start" : "Stop";
  const label = `${what} producer ${told.label}`;
  if (button.getAttribute("aria-label") === label) return;
  button.dataset.what = what.toLowerCase();
  setText(button, what);
  setAttribute(button, "aria-label", label);
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
const edited = new Set(); // fields that the user has edited; updates of the page do not overwrite them

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
  const thresholds = told.stop ? `, ON above ${whole(told.stop)}, OFF below ${whole(told.resume)} ${told.unit}` : ", no thresholds";
  const held = told.heldConfirms ? `, holds ${whole(told.heldConfirms)} confirms` : "";
  setWords(
    "detail-words",
    `${told.on ? "ON" : "OFF"} at ${whole(told.depth)} messages, ${whole(told.bytes)} bytes${thresholds}; turned ON ${whole(told.timesOn)} times; blocks (flows) ${whole(told.blocked)} producers${held}.`,
  );
  for (const field of inputs) {
    const value = String(told.thresholds[field.name]);
    if (edited.has(field) || field.value === value) continue;
    field.value = value;
    // The assignment drops the selection. With all selected, the keys that follow replace the new value.
    if (field === document.activeElement) field.select();
  }
  chart.show(told);
}

thresholds.addEventListener("input", (event) => edited.add(event.target));
thresholds.addEventListener("submit", async (event) => {
  event.preventDefault();
  // Send only the edited fields, because another operator can have changed the other thresholds.
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
    // A field that the user has edited during the request stays in `edited`, because its new text was not sent.
    for (const [field, value] of sent) if (field.value === value) edited.delete(field);
    setAnswer("The thresholds are set.", []);
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
  drawn: null, // the data that the chart shows
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
    this.drawn = this.told;
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
      // Shade the time from the first poll at which the queue was ON to the first poll at which it was OFF.
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
  },
  draw() {
    if (this.plot === null || this.told === this.drawn) return;
    this.drawn = this.told;
    this.plot.setData(this.data());
  },
  recolour() {
    // Create the chart again, because its legend does not change its colours.
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

let graph = null; // the last graph from model.js
const drawn = { told: null, isOld: false, nodes: [], edges: [] };

function svg(name, attributes = {}) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

function tellGraph(told) {
  graph = told;
  setWords("graph-words", told.words + (told.rest ? ` Not drawn: ${told.rest}.` : ""));
}

// Draw the last graph. SVG elements of the previous drawing are reused.
function showGraph() {
  if (graph === null || (graph === drawn.told && !drawn.isOld)) return;
  drawn.told = graph;
  drawn.isOld = false;
  const picture = byId("graph");
  setAttribute(picture, "width", String(Math.ceil(graph.width)));
  setAttribute(picture, "height", String(Math.ceil(graph.height)));
  fit(picture.firstElementChild, drawn.edges, graph.edges.length, () => svg("path"));
  fit(picture.lastElementChild, drawn.nodes, graph.nodes.length, makeNode);
  graph.edges.forEach((edge, index) => {
    setAttribute(drawn.edges[index], "d", edge.path);
    setClass(drawn.edges[index], `edge ${edge.state}`);
  });
  const turn = updates % graph.nodes.length;
  graph.nodes.forEach((node, index) => {
    const group = drawn.nodes[index];
    setAttribute(group, "transform", `translate(${node.x} ${node.y})`);
    const [title, rect, label, sub] = group.children;
    // An invisible node is written only in its turn, or if it has to show another object than before.
    if (index !== turn && away.has(group) && title.textContent === node.label) {
      drawn.isOld = true;
      return;
    }
    setClass(group, `node ${node.state}${node.kind === "queue" ? " pick" : ""}`);
    setAttribute(rect, "rx", node.kind === "exchange" ? "20" : "5");
    setAttribute(label, "y", node.sub ? "16" : "24");
    setText(title, node.label);
    setText(label, clip(node.label));
    setText(sub, clip(node.sub));
  });
}

function fit(place, made, count, make) {
  while (made.length < count) {
    made.push(make());
    place.append(made.at(-1));
  }
  while (made.length > count) made.pop().remove();
}

function makeNode() {
  const group = svg("g");
  const rect = svg("rect", { width: 190, height: 40 });
  group.append(svg("title"), rect, svg("text", { x: 8 }), svg("text", { x: 8, y: 32, class: "sub" }));
  sight.observe(group);
  return group;
}

byId("graph").addEventListener("click", ({ target }) => {
  const at = drawn.nodes.indexOf(target.closest(".node"));
  if (at >= 0 && drawn.told.nodes[at].kind === "queue") select(drawn.told.nodes[at].label, true);
});

function clip(text) {
  return text.length > 26 ? `${text.slice(0, 25)}…` : text;
}

setTheme();
