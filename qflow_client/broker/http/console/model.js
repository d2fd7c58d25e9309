// The model of the broker, in a worker thread. It reads the events of the broker, sorts and counts the objects, writes
// the texts, computes the layout of the graph, and draws the sparklines. The page gets only the data that it shows.
import { graphlib, layout } from "./vendor/dagre-3.1.3/dagre.esm.js";
import { drawSparks } from "./sparks.js";
import { many, number, seconds, whole } from "./words.js";

const HISTORY = 600; // maximum number of points in a series; `look` adds one point in each period
const RATE_OVER = 6; // number of points over which a rate is averaged
const SPARK = 120;
const PAGE = 15;
const MOST = 24; // maximum number of nodes of each kind in the graph
const API = new URL("../api/", self.location.href);

const queues = new Map(); // name → queue, in the order in which the event stream first named them
const channels = new Map();
const connections = new Map();
const histories = new Map(); // queue name → History
let exchanges = [];
let bindings = [];
let producersStopped = false;
let times = []; // times of the points, in seconds since 1970
let period = 1;
let token = null;
let reading = null; // AbortController of the current event stream
const publishedBefore = new Map(); // producer name → [time, number of published messages] at each of the last points
let view = {
  queues: { filter: "", sort: "order", only: false, page: 0 },
  producers: { filter: "", sort: "order", only: false, page: 0 },
  selected: null,
};
let sparks = null; // canvas for the sparklines of the table of queues
let colours = null;
let positions = { key: "", graph: null };
let wasFlowed = new Map(); // queue name → whether the queue was ON at the previous call of `news`
let changed = true;

class History {
  constructor(length) {
    // The queue has no values at the earlier points.
    this.depth = new Array(length).fill(null);
    this.bytes = new Array(length).fill(null);
    this.on = new Array(length).fill(false);
    this.rateIn = this.rateOut = 0;
    this.before = []; // [time, messages that entered so far, messages that left so far] at each of the last points
  }
  look(queue, now) {
    this.depth.push(queue.depth);
    this.bytes.push(queue.bytes);
    this.on.push(queue.flowStopped);
    const gone = queue.acked + queue.dropped;
    const [since, published, wentBefore] = this.before[0] ?? [now, 0, 0];
    if (now > since) {
      this.rateIn = (queue.published - published) / (now - since);
      this.rateOut = (gone - wentBefore) / (now - since);
    }
    this.before.push([now, queue.published, gone]);
    if (this.before.length > RATE_OVER) this.before.shift();
    if (this.depth.length > HISTORY) {
      this.depth.shift();
      this.bytes.shift();
      this.on.shift();
    }
  }
}

self.onmessage = ({ data }) => {
  if (data.kind === "start") {
    token = data.token;
    period = data.period;
    listen();
  } else if (data.kind === "view") {
    view = data.view;
    changed = true;
    tell();
  } else if (data.kind === "sparks") {
    sparks = data.canvas;
  } else if (data.kind === "colours") {
    colours = data.colours;
    tell();
  }
};

async function listen() {
  if (reading !== null) reading.abort();
  const abort = (reading = new AbortController());
  while (!abort.signal.aborted) {
    try {
      const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
      const response = await fetch(new URL(`events?period=${period}`, API), {
        headers,
        cache: "no-store",
        signal: abort.signal,
      });
      if (response.status === 401) {
        postMessage({ kind: "unauthorized" });
        return;
      }
      if (!response.ok) throw new Error(`the broker answers ${response.status}`);
      await read(response.body.pipeThrough(new TextDecoderStream()).getReader());
      throw new Error("the broker has stopped");
    } catch (error) {
      if (abort.signal.aborted) return;
      postMessage({ kind: "lost", why: String(error.message || error) });
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

async function read(reader) {
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    let from = Math.max(0, rest.length - 1);
    rest += value;
    for (let end; (end = rest.indexOf("\n\n", from)) >= 0; from = 0) {
      take(rest.slice(0, end));
      rest = rest.slice(end + 2);
    }
  }
}

function take(event) {
  const lines = event.split("\n");
  const kind = lines.find((line) => line.startsWith("event: "));
  const data = lines.find((line) => line.startsWith("data: "));
  if (!kind || !data) return;
  const told = JSON.parse(data.slice(6));
  if (kind === "event: state") {
    for (const known of [queues, channels, connections]) known.clear();
    postMessage({ kind: "connected" });
  }
  for (const [known, name] of [[queues, "queues"], [channels, "channels"], [connections, "connections"]]) {
    for (const each of told[name] ?? []) {
      known.set(each.name, each);
      each.seen = performance.now();
    }
    for (const gone of told.gone?.[name] ?? []) known.delete(gone);
  }
  if (told.exchanges) exchanges = told.exchanges;
  if (told.bindings) bindings = told.bindings;
  if ("producersStopped" in told) producersStopped = told.producersStopped;
  changed = true;
}

// Add one point to each series. `look` runs once in each period, even if nothing has changed.
function look() {
  const now = Date.now() / 1000;
  times.push(now);
  if (times.length > HISTORY) times.shift();
  for (const [name, queue] of queues) {
    let history = histories.get(name);
    if (!history) histories.set(name, (history = new History(times.length - 1)));
    history.look(queue, now);
  }
  for (const name of histories.keys()) if (!queues.has(name)) histories.delete(name);
  for (const channel of channels.values()) {
    if (!channel.isProducer) continue;
    let before = publishedBefore.get(channel.name);
    if (!before) publishedBefore.set(channel.name, (before = []));
    const [since, published] = before[0] ?? [now, 0];
    channel.rate = now > since ? (channel.published - published) / (now - since) : 0;
    before.push([now, channel.published]);
    if (before.length > RATE_OVER) before.shift();
  }
  for (const name of publishedBefore.keys()) if (!channels.has(name)) publishedBefore.delete(name);
  tell();
  setTimeout(look, period * 1000);
}
setTimeout(look, 300);

function flowedSeconds(channel) {
  return channel.flowedSeconds + (channel.flowed ? (performance.now() - channel.seen) / 1000 : 0);
}

function tell() {
  const producers = [...channels.values()].filter((channel) => channel.isProducer);
  const queuesShown = page([...queues.values()], view.queues, (queue) => queue.flowStopped);
  const producersShown = page(producers, view.producers, (producer) => producer.flowed);
  postMessage({
    kind: "view",
    counters: counters(producers),
    producersStopped,
    queues: { ...queuesShown, rows: queuesShown.rows.map(queueRow) },
    producers: { ...producersShown, rows: producersShown.rows.map(producerRow) },
    detail: detail(),
    graph: changed ? graph(producers) : null,
    news: news(),
  });
  changed = false;
  if (sparks !== null && colours !== null) {
    drawSparks(sparks, colours, queuesShown.rows.map((queue) => series(queue, histories.get(queue.name), SPARK)));
  }
}

function counters(producers) {
  let depth = 0, bytes = 0, on = 0, consumers = 0, rateIn = 0, rateOut = 0;
  for (const queue of queues.values()) {
    depth += queue.depth;
    bytes += queue.bytes;
    on += queue.flowStopped;
    consumers += queue.consumers;
    const history = histories.get(queue.name);
    rateIn += history?.rateIn ?? 0;
    rateOut += history?.rateOut ?? 0;
  }
  let flowed = 0;
  for (const producer of producers) flowed += producer.flowed;
  return [
    ["connections", connections.size],
    ["producers", producers.length],
    ["flowed", flowed],
    ["queues", queues.size],
    ["ON", on],
    ["messages", depth],
    ["bytes", bytes],
    ["in/s", Math.round(rateIn)],
    ["out/s", Math.round(rateOut)],
    ["consumers", consumers],
  ].map(([name, value]) => [name, number.format(value)]);
}

// Return the label of a queue (its name) or of a producer (the name of the client, if any, and of the channel).
function label(each) {
  return each.client ? `${each.client}, ${each.name}` : each.name;
}

function page(all, wanted, isHeld) {
  const filter = wanted.filter.toLowerCase();
  const found = all.filter((each) => (!wanted.only || isHeld(each)) && label(each).toLowerCase().includes(filter));
  if (wanted.sort === "name") found.sort((one, other) => (one.name < other.name ? -1 : 1));
  else if (wanted.sort === "flowedSeconds") found.sort((one, other) => flowedSeconds(other) - flowedSeconds(one));
  else if (wanted.sort !== "order") found.sort((one, other) => other[wanted.sort] - one[wanted.sort]);
  const pages = Math.max(1, Math.ceil(found.length / PAGE));
  const at = Math.min(wanted.page, pages - 1);
  return {
    rows: found.slice(at * PAGE, (at + 1) * PAGE),
    count: found.length,
    of: all.length,
    page: at,
    pages,
  };
}

function queueRow(queue) {
  const history = histories.get(queue.name);
  const numbers = [queue.depth, queue.bytes, history?.rateIn ?? 0, history?.rateOut ?? 0];
  numbers.push(queue.flowStoppedCount, queue.blocked.length, queue.consumers);
  return {
    name: queue.name,
    label: queue.name,
    state: queue.flowStopped ? "on" : "",
    cells: [queue.flowStopped ? "ON" : "OFF", ...numbers.map(whole)],
  };
}

// Return a queue's values for the chart: in bytes if the queue has only thresholds in bytes, otherwise in messages.
function series(queue, history, length) {
  const marks = queue.thresholds;
  const inBytes = !marks.flowStopCount && (marks.flowStopSize || marks.capacity);
  const values = history ? (inBytes ? history.bytes : history.depth) : [];
  return {
    unit: inBytes ? "bytes" : "messages",
    values: values.slice(-length),
    onAt: history ? history.on.slice(-length) : [],
    stop: inBytes ? marks.flowStopSize || marks.capacity : marks.flowStopCount,
    resume: inBytes ? (marks.flowStopSize ? marks.flowResumeSize : marks.flowResumeCapacity) : marks.flowResumeCount,
  };
}

function producerRow(producer) {
  const { blockedBy } = producer;
  const byOperator = blockedBy.includes("operator");
  const held = blockedBy.slice(0, 3).join(", ") + (blockedBy.length > 3 ? ` and ${blockedBy.length - 3} more` : "");
  return {
    name: producer.name,
    label: label(producer),
    state: byOperator ? "operator" : producer.flowed ? "on" : "",
    cells: [
      producer.flowed ? "flowed" : "unflowed",
      (held || "–") + (producer.flowOk ? "" : " (not answered)"),
      whole(producer.timesFlowed),
      seconds(flowedSeconds(producer)),
      whole(producer.published),
      whole(producer.rate ?? 0),
      whole(producer.unconfirmed),
    ],
  };
}

function detail() {
  const queue = view.selected === null ? undefined : queues.get(view.selected);
  if (!queue) return null;
  const history = histories.get(queue.name);
  return {
    name: queue.name,
    on: queue.flowStopped,
    depth: queue.depth,
    bytes: queue.bytes,
    timesOn: queue.flowStoppedCount,
    heldConfirms: queue.heldConfirms,
    blocked: queue.blocked.length,
    thresholds: queue.thresholds,
    times: times.slice(-(history?.depth.length ?? 0) || times.length),
    ...series(queue, history, HISTORY),
  };
}

function news() {
  const told = [];
  const now = new Map();
  for (const queue of queues.values()) {
    now.set(queue.name, queue.flowStopped);
    const before = wasFlowed.get(queue.name);
    if (before !== undefined && before !== queue.flowStopped) {
      told.push(`queue ${queue.name} is ${queue.flowStopped ? "ON" : "OFF"} at ${queue.depth} messages`);
    }
  }
  wasFlowed = now;
  return told;
}

// The graph. Producers that use the same exchanges, and that the same queues block, are one node. If they use the
// default exchange, their routing keys must be the same too. The consumers of a queue are one node.

function graph(producers) {
  const nodes = new Map();
  const edges = new Map();
  const node = (id, kind, label, sub, state = "") => nodes.set(id, { id, kind, label, sub, state });
  const edge = (from, to, state = "") => {
    const id = JSON.stringify([from, to]);
    const there = edges.get(id);
    // A blocked edge replaces an edge that is not blocked.
    if (!there || (state && !there.state)) edges.set(id, { id, from, to, state });
  };

  const groups = new Map();
  for (const producer of producers) {
    const exchangesOf = [...new Set(producer.targets.map((target) => target.exchange))].sort();
    const keys = exchangesOf.includes("") ? producer.targets.filter((each) => !each.exchange).map((each) => each.routingKey) : [];
    const id = JSON.stringify([exchangesOf, keys.sort(), producer.blockedBy]);
    const group = groups.get(id);
    if (group) group.members.push(producer);
    else groups.set(id, { id, exchangesOf, keys, blockedBy: producer.blockedBy, members: [producer] });
  }
  const shownGroups = [...groups.values()]
    .sort((one, other) => other.blockedBy.length - one.blockedBy.length || other.members.length - one.members.length)
    .slice(0, MOST);
  const shownQueues = new Set(
    [...queues.values()]
      .sort((one, other) => other.flowStopped - one.flowStopped || other.blocked.length - one.blocked.length || other.depth - one.depth)
      .slice(0, MOST)
      .map((queue) => queue.name),
  );

  const used = new Set();
  for (const group of shownGroups) {
    const state = group.blockedBy.includes("operator") ? "operator" : group.blockedBy.length ? "held" : "";
    const title = group.members.length === 1 ? group.members[0].client || group.members[0].name : `${group.members.length} producers`;
    node(`p${group.id}`, "producers", title, group.blockedBy.length ? `blocked by ${short(group.blockedBy)}` : "unflowed", state);
    for (const exchange of group.exchangesOf) {
      used.add(exchange);
      edge(`p${group.id}`, `e${exchange}`, state);
    }
    for (const key of group.keys) {
      if (shownQueues.has(key)) edge("e", `q${key}`, group.blockedBy.includes(key) ? "held" : "");
    }
  }
  const kinds = new Map(exchanges.map((exchange) => [exchange.name, exchange]));
  for (const exchange of exchanges) if (exchange.bindings) used.add(exchange.name);
  for (const name of used) {
    const exchange = kinds.get(name);
    if (exchange) node(`e${name}`, "exchange", name || "(default exchange)", exchange.type);
  }
  for (const name of shownQueues) {
    const queue = queues.get(name);
    const size = `${queue.depth.toLocaleString()} messages`;
    node(`q${name}`, "queue", name, queue.flowStopped ? `ON, ${size}` : size, queue.flowStopped ? "held" : "");
    if (queue.consumers) {
      node(`c${name}`, "consumers", queue.consumers === 1 ? "1 consumer" : `${queue.consumers} consumers`, "");
      edge(`q${name}`, `c${name}`);
    }
  }
  for (const binding of bindings) {
    const to = binding.destinationType === "queue" ? `q${binding.destination}` : `e${binding.destination}`;
    const holds = binding.destinationType === "queue" && queues.get(binding.destination)?.flowStopped;
    edge(`e${binding.source}`, to, holds ? "held" : "");
  }
  const rest = [];
  if (groups.size > shownGroups.length) rest.push(`${groups.size - shownGroups.length} more groups of producers`);
  if (queues.size > shownQueues.size) rest.push(`${queues.size - shownQueues.size} more queues`);
  const drawn = [...edges.values()].filter((each) => nodes.has(each.from) && nodes.has(each.to));
  return { ...place(nodes, drawn), words: words(producers), rest: rest.join(" and ") };
}

function short(names) {
  return names.length > 2 ? `${names[0]} and ${names.length - 1} more` : names.join(", ");
}

function words(producers) {
  const on = [...queues.values()].filter((queue) => queue.flowStopped);
  const told = on.slice(0, 5).map((queue) => `${queue.name} is ON and blocks (flows) ${many(queue.blocked.length, "producer")}`);
  if (on.length > 5) told.push(`${on.length - 5} more queues are ON`);
  const stopped = producers.filter((producer) => producer.blockedBy.includes("operator")).length;
  if (stopped) told.push(`the operator has stopped ${many(stopped, "producer")}`);
  if (told.length) return `${told.join("; ")}.`;
  return `No queue is ON, and no producer is blocked (flowed): ${many(producers.length, "producer")}, ${many(queues.size, "queue")}.`;
}

const WIDTH = 190, HEIGHT = 40;

function place(nodes, edges) {
  const key = JSON.stringify([[...nodes.keys()], edges.map((each) => each.id)]);
  if (key !== positions.key) {
    const drawing = new graphlib.Graph();
    drawing.setGraph({ rankdir: "LR", nodesep: 12, ranksep: 70, marginx: 8, marginy: 8 });
    drawing.setDefaultEdgeLabel(() => ({}));
    for (const id of nodes.keys()) drawing.setNode(id, { width: WIDTH, height: HEIGHT });
    for (const { from, to } of edges) drawing.setEdge(from, to);
    if (nodes.size) layout(drawing);
    const paths = new Map(edges.map((each) => [each.id, curve(drawing.edge(each.from, each.to).points)]));
    positions = { key, graph: drawing, paths };
  }
  const { graph: drawing, paths } = positions;
  return {
    width: nodes.size ? drawing.graph().width : 0,
    height: nodes.size ? drawing.graph().height : 0,
    nodes: [...nodes.values()].map((each) => ({ ...each, x: drawing.node(each.id).x - WIDTH / 2, y: drawing.node(each.id).y - HEIGHT / 2 })),
    edges: edges.map((each) => ({ path: paths.get(each.id), state: each.state })),
  };
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
