// The live page of a job. It shows what /status.json has, and changes nothing.
//
// Names, hosts and messages come from workers: they are inserted as text nodes, never as markup.
"use strict";

const POLL_MILLISECONDS = 2000;
const TIMEOUT_MILLISECONDS = 8000;
const PHASES = ["data", "compute", "push", "wait", "apply", "pull"];
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600, HEIGHT = 140;

const byId = (id) => document.getElementById(id);

// ---- elements ---------------------------------------------------------------------------------

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  for (const child of children) {
    if (child !== null && child !== undefined && child !== "") {
      node.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
  }
  return node;
}

const make = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
  node.hidden = !text;
}

// ---- numbers ----------------------------------------------------------------------------------

const known = (value) => value !== null && value !== undefined;

function number(value) {
  if (!known(value)) return "";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-4 || size >= 1e7) ? value.toExponential(3)
    : String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  if (!known(seconds)) return "";
  if (seconds < 1) return `${number(seconds * 1000)} ms`;
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (hours < 1) return `${minutes} min`;
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function size(bytes) {
  if (!known(bytes)) return "";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let value = bytes, unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
}

const share = (value) => known(value) ? `${(100 * value).toFixed(1)} %` : "";
const clock = (milliseconds) => new Date(milliseconds).toLocaleTimeString("en-GB");

// ---- lists and tables -------------------------------------------------------------------------

function list(node, entries, of) {
  node.replaceChildren(...entries.map(([name, cell]) => [name, cell(of)])
    .filter(([, value]) => known(value) && value !== "")
    .map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

// columns: heading, cell of a row (text, number or element), and whether it is a number
function table(node, columns, rows) {
  if (!node.tHead) {
    node.append(make("thead", {}, make("tr", {}, ...columns.map(([heading, , isNumber]) =>
      make("th", {scope: "col", class: isNumber ? "number" : null}, heading)))), make("tbody"));
  }
  node.tBodies[0].replaceChildren(...rows.map((row) => make("tr", {}, ...columns.map(
    ([heading, cell, isNumber]) =>
      make("td", {"data-label": heading, class: isNumber ? "number" : null}, cell(row))))));
}

// ---- curves -----------------------------------------------------------------------------------

class Chart {
  constructor(name) {
    this.name = name;
    this.points = [];
    this.selected = null;
    this.path = draw("path");
    this.dots = draw("g");
    this.cursor = draw("line", {class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden"});
    this.svg = draw("svg", {class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
      preserveAspectRatio: "none", tabindex: 0},
      draw("line", {x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT}), this.path, this.dots, this.cursor);
    this.value = make("span");
    this.from = make("span");
    this.range = make("span");
    this.to = make("span");
    this.figure = make("figure", {},
      make("figcaption", {}, make("span", {}, name), this.value), this.svg,
      make("div", {class: "axis"}, this.from, this.range, this.to));
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.select(this.nearest((event.clientX - box.left) / box.width * WIDTH));
    });
    for (const end of ["pointerleave", "blur"]) {
      this.svg.addEventListener(end, () => this.select(null));
    }
    this.svg.addEventListener("keydown", (event) => {
      const last = this.points.length - 1, at = this.selected ?? last;
      const next = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last}[event.key];
      if (next === undefined) return;
      event.preventDefault();
      this.select(Math.max(0, Math.min(last, next)));
    });
  }

  update(curve) {
    this.points = curve.times.map((time, i) => [time, curve.values[i]]);
    const finite = this.points.filter(([, value]) => value !== null);
    const values = finite.map(([, value]) => value), times = this.points.map(([time]) => time);
    let low = Math.min(...values), high = Math.max(...values);
    if (low === high) { low -= Math.abs(low) / 2 || 1; high += Math.abs(high) / 2 || 1; }
    const first = Math.min(...times), last = Math.max(...times);
    this.x = (time) => last > first ? (time - first) / (last - first) * (WIDTH - 8) + 4 : WIDTH / 2;
    const y = (value) => HEIGHT - 6 - (value - low) / (high - low) * (HEIGHT - 12);
    const parts = [];
    let isOpen = false;
    for (const [time, value] of this.points) {  // a value that is not finite leaves a gap
      if (value !== null) {
        parts.push(`${isOpen ? "L" : "M"}${this.x(time).toFixed(1)} ${y(value).toFixed(1)}`);
      }
      isOpen = value !== null;
    }
    this.path.setAttribute("d", parts.join(""));
    this.dots.replaceChildren(...(finite.length === 1
      ? [draw("circle", {cx: this.x(finite[0][0]), cy: y(finite[0][1]), r: 4})] : []));
    say(this.from, times.length ? clock(first * 1000) : "");
    say(this.to, times.length ? clock(last * 1000) : "");
    say(this.range, finite.length
      ? `${number(Math.min(...values))} to ${number(Math.max(...values))}` : "");
    this.svg.setAttribute("aria-label", `${this.name}: ${this.points.length} values, ` +
      `${this.range.textContent}, newest ${this.shown(this.points.length - 1)}`);
    this.select(this.selected);
  }

  shown(index) {
    const point = this.points[index];
    if (!point) return "";
    return point[1] === null ? "not finite" : number(point[1]);
  }

  nearest(x) {
    let best = null;
    this.points.forEach(([time], i) => {
      const far = Math.abs(this.x(time) - x);
      if (best === null || far < best[0]) best = [far, i];
    });
    return best && best[1];
  }

  select(index) {
    const point = index === null ? undefined : this.points[index];
    this.selected = point ? index : null;
    this.cursor.setAttribute("visibility", point ? "visible" : "hidden");
    if (point) {
      const x = this.x(point[0]).toFixed(1);
      this.cursor.setAttribute("x1", x);
      this.cursor.setAttribute("x2", x);
      this.value.textContent = `${clock(point[0] * 1000)}  ${this.shown(index)}`;
    } else {
      this.value.textContent = this.shown(this.points.length - 1);
    }
  }
}

const charts = new Map();

function showCurves(series) {
  const found = new Map();
  if (series.samples_per_second.times.length) found.set("samples/s", series.samples_per_second);
  for (const [name, curve] of Object.entries(series.reported)) found.set(`reported: ${name}`, curve);
  for (const [key, curve] of found) {
    if (!charts.has(key)) charts.set(key, new Chart(key.replace(/^reported: /, "")));
    charts.get(key).update(curve);
  }
  for (const key of charts.keys()) if (!found.has(key)) charts.delete(key);
  const figures = [...found.keys()].map((key) => charts.get(key).figure);
  const shown = [...byId("curves").children];
  // an element that is inserted again loses the focus
  if (figures.length !== shown.length || figures.some((figure, i) => figure !== shown[i])) {
    byId("curves").replaceChildren(...figures);
  }
  say(byId("curves-note"), series.omitted
    ? `${series.omitted} more reported names: ps-ctl status shows their newest values` : "");
}

// ---- workers ----------------------------------------------------------------------------------

byId("legend").append(...PHASES.map((phase) => make("span", {},
  draw("svg", {viewBox: "0 0 1 1", "aria-hidden": "true"},
    draw("rect", {class: phase, width: 1, height: 1})), phase)));

const totals = new Map();  // by worker or shard: phase_seconds of the last document that changed them
const phases = new Map();  // by worker or shard: seconds by phase between the last two that differ

function measurePhases({workers, servers}) {
  const found = new Map([...workers.map((row) => [`worker ${row.worker}`, row.phase_seconds]),
    ...servers.map((row) => [`shard ${row.shard}`, row.phase_seconds])]);
  for (const [key, now] of found) {
    const before = totals.get(key) ?? {};
    const spent = Object.entries(now ?? {}).map(
      ([phase, seconds]) => [phase, Math.max(0, seconds - (before[phase] ?? 0))]);
    if (spent.some(([, seconds]) => seconds > 0)) {
      phases.set(key, Object.fromEntries(spent));
      totals.set(key, now);
    }
  }
  for (const key of totals.keys()) {
    if (!found.has(key)) { totals.delete(key); phases.delete(key); }
  }
}

// shares of the phases that take at least 1 %, as text, largest first
function phaseShares(key) {
  const spent = Object.entries(phases.get(key) ?? {});
  const sum = spent.reduce((all, [, seconds]) => all + seconds, 0);
  return spent.map(([phase, seconds]) => [seconds / sum, phase]).filter(([part]) => part >= 0.01)
    .sort((a, b) => b[0] - a[0]).map(([part, phase]) => `${phase} ${(100 * part).toFixed(0)} %`);
}

function phaseBar(worker) {
  const key = `worker ${worker}`, spent = phases.get(key), text = phaseShares(key);
  if (!spent) return "";
  const sum = PHASES.reduce((all, phase) => all + (spent[phase] ?? 0), 0);
  let x = 0;
  const parts = PHASES.map((phase) => {
    const width = 100 * (spent[phase] ?? 0) / sum;
    const part = draw("rect", {class: phase, x, y: 0, height: 10, width});
    x += width;
    return part;
  });
  return make("span", {},
    draw("svg", {class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img",
      "aria-label": text.join(", ")}, draw("title", {}, text.join(", ")), ...parts),
    text.slice(0, 2).join(", "));
}

const LEVEL = {live: "good", slow: "warn", silent: "warn", hanging: "bad", lost: "bad",
  warning: "warn", error: "bad", critical: "bad"};
const mark = (text) => make("span", {class: LEVEL[text] ?? "dim"}, text);

const WORKERS = [
  ["worker", (row) => row.worker, true],
  ["rank", (row) => row.rank, true],
  ["host", (row) => known(row.host) ? `${row.host}:${row.pid}` : ""],
  ["health", (row) => mark(row.health)],
  ["phases", (row) => phaseBar(row.worker)],
  ["own part", (row) => duration(row.own_seconds), true],
  ["step", (row) => duration(row.step_seconds), true],
  ["samples/s", (row) => number(row.samples_per_second), true],
  ["staleness", (row) => row.staleness, true],
  ["steps", (row) => number(row.steps), true],
  ["silent", (row) => duration(row.silent_seconds), true],
  ["device", (row) => row.device],
  ["reason", (row) => row.health === "hanging"
    ? `no call from its script for ${duration(row.no_call_seconds)}`
    : row.reason || (row.draining ? "asked to leave" : "")],
];

const SERVERS = [
  ["shard", (row) => row.shard, true],
  ["address", (row) => row.address],
  ["connected", (row) => make("span", {class: row.connected ? "good" : "bad"},
    row.connected ? "yes" : "no")],
  ["version", (row) => number(row.version), true],
  ["weights", (row) => size(row.parameter_bytes), true],
  ["received", (row) => size(row.received_bytes), true],
  ["sent", (row) => size(row.sent_bytes), true],
  ["phases", (row) => phaseShares(`shard ${row.shard}`).slice(0, 3).join(", ")],
  ["standby", (row) => row.standby || make("span", {class: "dim"}, "none")],
  ["standby state", (row) => row.standby ? row.standby_state : ""],
  ["records behind", (row) => row.standby ? number(row.standby_behind) : "", true],
];

const EVENTS = [
  ["time", (row) => make("time", {datetime: row.time, title: row.time}, clock(Date.parse(row.time)))],
  ["level", (row) => mark(row.level)],
  ["event", (row) => row.event],
  ["fields", (row) => Object.entries(row.fields).map(([name, value]) => `${name}=${value}`).join(" ")],
];

// ---- the whole document -----------------------------------------------------------------------

function progressText(progress) {
  if (!known(progress.percent)) return progress.loop === null ? "no batch has counted yet" : "";
  const passes = known(progress.passes) ? ` of ${progress.passes}` : "";
  const left = known(progress.remaining_seconds) && progress.percent < 100
    ? `, ${duration(progress.remaining_seconds)} left` : "";
  return `pass ${progress.pass}${passes}: ${progress.percent.toFixed(0)} %${left}`;
}

function policyText(status) {
  if (known(status.staleness)) return `${status.policy}, at most ${status.staleness} steps apart`;
  return known(status.max_staleness)
    ? `${status.policy}, staleness at most ${status.max_staleness}` : status.policy;
}

// of each optimizer of the model; their names only if there are several
function ofOptimizers(status, cell) {
  return status.optimizers.map((row) => [row.optimizer, cell(row)]).filter(([, text]) => text)
    .map(([name, text]) => name ? `${name}: ${text}` : text).join(", ");
}

// name and value (text, number or element)
const SUMMARY = [
  ["state", (status) => status.state],
  ["policy", policyText],
  ["version", (status) => number(status.version)],
  ["samples/s", (status) => number(status.progress.samples_per_second)],
  ["loss", (status) => "loss" in status.metrics
    ? number(status.metrics.loss) || "not finite" : ""],
  ["learning rate", (status) => ofOptimizers(status,
    (row) => [...new Set(row.learning_rates.map(number))].filter(Boolean).join(", "))],
  ["gradient norm", (status) => ofOptimizers(status, (row) => number(row.gradient_norm))],
  ["goodput, samples", ({goodput}) => share(goodput.samples)],
  ["goodput, time", ({goodput}) => share(goodput.seconds)],
  ["workers", (status) => status.workers_omitted ? ""
    : status.workers.filter((row) => known(row.silent_seconds)).length],
  ["samples", (status) => number(status.samples)],
  ["running for", (status) => duration(status.seconds)],
  ["model", ({model}) => model && `${number(model.parameters)} parameters, ${size(model.bytes)}`],
  ["optimizer", ({model}) => model && model.optimizer],
  ["training", (status) => status.trainings_finished.length
    ? `${status.training}, number ${status.trainings_finished.length + 1}` : ""],
];

const SNAPSHOT = [
  ["version", ({newest}) => newest && number(newest.version)],
  ["age", ({newest}) => newest && duration(newest.seconds)],
  ["size", ({newest}) => newest && size(newest.nbytes)],
  ["complete", ({newest, problem}) => newest ? "yes" : problem ? "no, it failed" : "none yet"],
  ["newer one", ({newest, problem}) => newest && problem ? "failed" : ""],
];

function show(status) {
  say(byId("job"), `Job ${status.job}`);
  document.title = `${status.state} · ${status.job}`;
  say(byId("waiting"), status.waiting_for ? `The job waits for ${status.waiting_for}.` : "");
  say(byId("problem"), status.snapshot_problem ? `Snapshot: ${status.snapshot_problem}` : "");
  list(byId("summary"), SUMMARY, status);
  const percent = status.progress.percent;
  byId("progress").hidden = !known(percent);
  if (known(percent)) byId("progress").value = percent;
  say(byId("progress-text"), progressText(status.progress));
  showCurves(status.series);
  measurePhases(status);
  table(byId("workers"), WORKERS, status.workers);
  say(byId("workers-note"), status.workers.length === 0 ? "No worker has joined yet."
    : status.workers_omitted ? `${status.workers_omitted} more: ps-ctl workers shows them` : "");
  table(byId("servers"), SERVERS, status.servers);
  const newest = status.snapshots.reduce(
    (best, row) => best === null || row.version > best.version ? row : best, null);
  list(byId("snapshot"), SNAPSHOT, {newest, problem: status.snapshot_problem});
  table(byId("events"), EVENTS, [...status.events].reverse());
  byId("main").hidden = false;
}

// ---- the connection ---------------------------------------------------------------------------

let lostAt = null, shownAt = null, timer = null;

function connected() {
  const node = byId("connection");
  if (lostAt !== null) say(node, `The server answers again since ${clock(Date.now())}`);
  else if (shownAt === null) say(node, "Connected");
  lostAt = null;
  shownAt = Date.now();
  node.classList.remove("lost");
  byId("main").classList.remove("lost");
}

function lost(problem) {
  lostAt ??= Date.now();
  const state = shownAt === null ? "" : ` This is the state of ${clock(shownAt)}.`;
  say(byId("connection"), `${problem} since ${clock(lostAt)}.${state}`);
  byId("connection").classList.add("lost");
  byId("main").classList.add("lost");
  document.title = document.title.replace(/^(gone · )?/, "gone · ");
}

// Return the status, or say why there is none.
async function ask() {
  try {
    const answer = await fetch("status.json", {signal: AbortSignal.timeout(TIMEOUT_MILLISECONDS)});
    if (answer.ok) return await answer.json();
    lost(answer.status === 401 || answer.status === 403
      ? "The server refuses this browser (reload the page to enter a token)"
      : `The server answers with an error (${answer.status})`);
  } catch {
    lost("The server does not answer");
  }
  return null;
}

async function poll() {
  clearTimeout(timer);
  const status = await ask();
  if (status !== null) {
    connected();
    show(status);
  }
  clearTimeout(timer);  // of a poll that ended meanwhile
  if (!document.hidden) timer = setTimeout(poll, POLL_MILLISECONDS);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
poll();
