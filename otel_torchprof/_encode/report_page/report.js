"use strict";
// Draws the report from the data in the page. Texts of the data come from trace files that nobody vouches for, so they are set as
// text only, never as HTML. Sizes: a few thousand bars, some ten thousand nodes, a few thousand rows.

const report = JSON.parse(document.getElementById("data").textContent);
const isDiff = report.files.length > 1;
const main = document.getElementById("main");
const redraws = [];
// Number of steps of each recording of two, by which their sums are divided.
const stepsOf = report.files.map((_, side) => (report.steps ?? []).reduce((sum, each) => sum + (each.side === side ? each.count : 0), 0) || 1);

// ---- elements and numbers ----

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

const count = (number) => number.toLocaleString("en-US");
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "");
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

const SCALES = {
  time: [["s", 1e9], ["ms", 1e6], ["µs", 1e3]],
  bytes: [["GB", 2 ** 30], ["MB", 2 ** 20], ["KB", 2 ** 10], ["B", 1]], // as torch's tables have them
  flops: [["TFLOP", 1e12], ["GFLOP", 1e9], ["MFLOP", 1e6], ["kFLOP", 1e3], ["FLOP", 1]],
  count: [["", 1]],
};

// One unit for a column or an axis, chosen by its largest value, and the function that writes a value in it.
function unitOf(kind, largest) {
  const [unit, scale] = SCALES[kind].find(([, size]) => largest >= size) ?? SCALES[kind].at(-1);
  const digits = kind === "count" || unit === "B" ? 0 : largest / scale >= 100 ? 1 : 2;
  const written = (value) =>
    (value / scale).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return { unit, scale, written, text: (value) => (unit ? `${written(value)} ${unit}` : written(value)) };
}
const text = (kind, value) => unitOf(kind, Math.abs(value)).text(value);
const micros = (value) => text("time", 1000 * value);

// ---- colours ----

const KIND_NAMES = {
  operator: "operator", backward: "backward", label: "label or phase", module: "module", python: "Python",
  device: "work of a device", other: "other",
};
const PHASE_COLOURS = {
  data: "data", forward: "forward", backward: "backward-phase", optimizer: "optimizer", inference: "forward", generate: "forward",
  prefill: "compile", decode: "forward", evaluation: "extra", checkpoint: "checkpoint", collective: "collective",
  compile: "compile", gc: "gc", device_wait: "wait", unattributed: "unattributed", "not known": "unattributed",
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const phaseColour = (phase) => colour(PHASE_COLOURS[phase] ?? "extra");

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  redraws.forEach((redraw) => redraw());
  document.querySelectorAll("[data-colour]").forEach(paint);
});
function paint(element) {
  element.style.background = colour(element.dataset.colour);
}
function swatch(name) {
  const dot = make("i", { "data-colour": name });
  paint(dot);
  return dot;
}

// ---- a canvas that fits its box, and the box beside the pointer ----

function drawing(parent, height, label, draw) {
  const canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": label });
  parent.append(canvas);
  const redraw = () => {
    const width = canvas.clientWidth || parent.clientWidth;
    if (!width) return;
    const tall = typeof height === "function" ? height(width) : height;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
    canvas.style.height = `${tall}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    draw(context, width, tall);
  };
  let known = 0;
  new ResizeObserver(() => {
    if (canvas.clientWidth !== known) {
      known = canvas.clientWidth;
      redraw();
    }
  }).observe(canvas);
  redraws.push(redraw);
  redraw();
  return { canvas, redraw };
}

const tip = document.getElementById("tip");
function showTip(event, title, rows = []) {
  tip.replaceChildren(make("b", {}, title), ...rows.map(([name, value]) => make("div", {}, make("span", {}, name), value)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? Math.max(8, event.clientY - height - 12) : event.clientY + 18}px`;
}
const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true });

const LEFT = 58;
// Lines and labels of the vertical axis; returns the function from a value to its height.
function axis(context, width, height, largest, unit) {
  const rough = largest / unit.scale / 4;
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const each = ([1, 2, 5, 10].find((step) => step * power >= rough) ?? 10) * power * unit.scale;
  const at = (value) => height - 20 - ((height - 34) * Math.min(value, largest)) / (largest || 1);
  context.textAlign = "right";
  for (let value = 0; value <= largest * 1.001; value += each) {
    context.fillStyle = colour("line");
    context.fillRect(LEFT, Math.round(at(value)), width - LEFT, 1);
    context.fillStyle = colour("quiet");
    const shown = (value / unit.scale).toLocaleString("en-US", { maximumFractionDigits: 2 });
    context.fillText(value + each > largest * 1.001 ? `${shown} ${unit.unit}` : shown, LEFT - 6, at(value));
  }
  return at;
}
// Labels below, at most as many as fit; the last one does not run out of the picture.
function below(context, width, height, number, labelOf) {
  const every = Math.max(1, Math.ceil(number / Math.max(2, Math.floor((width - LEFT) / 90))));
  context.fillStyle = colour("quiet");
  for (let at = 0; at < number; at += every) {
    const label = labelOf(at);
    const place = LEFT + ((at + 0.5) * (width - LEFT)) / number;
    context.textAlign = place + context.measureText(label).width / 2 > width ? "right" : "center";
    context.fillText(label, Math.min(place, width), height - 8);
  }
}

function section(id, title, lead) {
  const body = make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title));
  if (lead) body.append(make("p", { class: "lead" }, lead));
  main.append(body);
  document.querySelector("nav").append(make("a", { href: `#${id}` }, title));
  return body;
}

// ---- the head: what was found, in one sentence ----

function head() {
  const found = report.headline || (report.absent["Verdict and steps"] ? "No verdict: the recording has no steps" : "No verdict");
  document.title = `${report.files.map((file) => file.name).join(" → ")} · otel-torchprof`;
  const about = (file) => [
    file.name, `${plural(file.events, "event")} in ${micros(file.duration)}`, ...(file.began ? [`began ${file.began}`] : []),
  ];
  const lines = report.files.map((file) => make("div", { class: "meta" }, ...about(file).map((part) => make("span", {}, part))));
  document.getElementById("head").append(
    make("p", { class: "eyebrow" }, isDiff ? "otel-torchprof report: after, compared with before" : "otel-torchprof report"),
    make("h1", {}, found), ...lines, make("nav", { "aria-label": "Sections" }),
  );
}

// ---- verdicts, with their evidence and what to do ----

function verdict() {
  const answer = report.explanation;
  if (!answer) return;
  const ranks = answer.ranks.length > 1 ? `${count(answer.ranks.length)} ranks, ` : "";
  const busy = answer.knows_runnable ? "" : " Whether the machine was busy is not in the recording.";
  const lead = `${ranks}${plural(answer.steps, "step")}, ${count(answer.steady_steps)} of them steady, median ${text("time", answer.step_median_seconds * 1e9)}.${busy}${answer.step_rule ? ` ${answer.step_rule}.` : ""}`;
  const body = section("verdict", "Verdict", lead);
  for (const finding of answer.findings) body.append(card(finding, finding.severity !== "none"));
  for (const note of answer.notes) body.append(card(note, false));
  for (const doubt of answer.abstentions) {
    body.append(make("div", { class: "finding" }, make("strong", {}, `No verdict${answer.ranks.length > 1 ? ` for ${doubt.subject}` : ""}: ${doubt.reason}`),
      make("dl", {}, make("dt", {}, "Next"), make("dd", {}, doubt.way_out))));
  }
}
function card(finding, isFault) {
  const sentence = finding.sentence ?? `${finding.verdict}: ${percent(finding.share, 1)} ${finding.statement}`;
  const tags = [isFault ? `severity ${finding.severity}` : finding.is_note ? "note" : "no fault", finding.confidence, ...(finding.ranks.length ? [finding.ranks.slice(0, 6).join(", ")] : [])];
  const stake = finding.recoverable_seconds ? [make("dt", {}, "At stake"), make("dd", {}, `at most ${text("time", finding.recoverable_seconds * 1e9)} of the recording`)] : [];
  return make("div", { class: `finding${isFault ? " fault" : ""}` }, make("strong", {}, sentence), make("span", { class: "tag" }, tags.join(" · ")),
    make("ul", {}, ...finding.evidence.map((line) => make("li", {}, line))),
    make("dl", {}, ...stake, make("dt", {}, "Next"), make("dd", {}, finding.next_action), make("dt", {}, "Check"), make("dd", {}, finding.check)));
}

// ---- what changed between two recordings ----

function changes() {
  const found = report.diff;
  if (!found) return;
  const ratio = (value) => `${value >= 1 ? "+" : "−"}${Math.abs(100 * (value - 1)).toFixed(1)} %`;
  const lead = `Step time ${ratio(found.ratio)} (95 % interval ${ratio(found.interval[0])} to ${ratio(found.interval[1])}); the median name ${ratio(found.common)}. Times are self time per step.`;
  const body = section("changes", "What changed", lead);
  const unit = unitOf("time", 1e9 * Math.max(0, ...found.changes.flatMap((each) => [each.before, each.after])));
  if (found.changes.length) {
    const rows = found.changes.map((each) => {
      const isNew = each.calls_before === 0, isOver = each.calls_after === 0;
      const moved = isNew ? "new" : isOver ? "vanished" : ratio(each.after / each.before);
      return make("tr", {}, make("td", {}, each.path.length ? each.path.join(" › ") : each.name), make("td", {}, unit.written(each.before * 1e9)),
        make("td", {}, unit.written(each.after * 1e9)), make("td", { class: each.share > 0 ? "slower" : "faster" }, moved),
        make("td", {}, `${each.share > 0 ? "+" : "−"}${Math.abs(100 * each.share).toFixed(1)}`));
    });
    const titles = ["Name", `Before, ${unit.unit}`, `After, ${unit.unit}`, "Change", "Of the step, %"].map((title) => make("th", { scope: "col" }, title));
    body.append(make("div", { class: "table" }, make("table", {}, make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...rows))));
  } else body.append(make("p", {}, "No name changed by more than chance."));
  const doubts = [...found.doubts, ...found.caveats];
  if (doubts.length) body.append(make("ul", { class: "notes" }, ...doubts.map((line) => make("li", {}, line))));
}

// ---- steps over time ----

function steps() {
  const all = report.steps ?? [];
  if (!all.length) return;
  const total = all.reduce((sum, each) => sum + each.count, 0);
  const together = all[0].steps > 1 ? ` Each bar is the mean of ${count(all[0].steps)} steps.` : "";
  const slow = all.reduce((sum, each) => sum + each.slow.reduce((a, b) => a + b, 0), 0);
  const body = section("steps", "Steps", `${plural(total, "step")}; ${count(slow)} took 1.5 medians or more and ${slow === 1 ? "has" : "have"} a mark.${together}`);
  const shown = isDiff ? all : [all.find((each) => (report.explanation?.findings[0]?.ranks ?? []).includes(each.name)) ?? all[0]];
  if (!isDiff && all.length > 1) {
    const choice = make("select", { "aria-label": "Rank", onchange: () => draw([all[choice.selectedIndex]]) }, ...all.map((each) => make("option", { selected: each === shown[0] }, each.name)));
    body.append(make("div", { class: "controls" }, make("label", {}, "Rank ", choice)));
  }
  const pictures = body.appendChild(make("div"));
  // A first step that compiles would flatten all others: bars are cut, unless they are wanted whole.
  const draw = (series) => {
    const sorted = series.flatMap((each) => each.longest).sort((a, b) => a - b);
    const whole = sorted.at(-1), usual = Math.max(5 * sorted[sorted.length >> 1], 1);
    pictures.replaceChildren();
    let isWhole = whole <= 1.5 * usual;
    const charts = [];
    if (!isWhole) {
      const button = make("button", { class: "plain", type: "button", "aria-pressed": "false", onclick: () => {
        isWhole = !isWhole;
        button.setAttribute("aria-pressed", String(isWhole));
        charts.forEach((chart) => chart());
      } }, "Whole bars");
      pictures.append(make("div", { class: "controls" }, button, make("span", { class: "quiet" }, `longer bars are cut at ${micros(usual)}, five medians`)));
    }
    for (const each of series) {
      if (series.length > 1) pictures.append(make("h3", {}, each.name));
      charts.push(stepChart(pictures, each, () => (isWhole ? whole : usual)));
    }
  };
  draw(shown);
  slowTable(body);
}

const rate = (name, value) => (name === "flops" ? `${text("flops", value)}/s` : `${count(Math.round(value))} ${name}/s`);

function stepChart(parent, series, largestOf) {
  const number = series.duration.length;
  const phases = Object.keys(series.phases);
  let chosen = -1;
  const detail = make("div", { class: "detail", "aria-live": "polite" }, "Tap a bar, or use the arrow keys, for what is in it.");
  const drawn = drawing(parent, 220, `${series.name}: durations of ${number} steps by phase`, (context, width, height) => {
    const largest = largestOf(), unit = unitOf("time", largest * 1000);
    const at = axis(context, width, height, largest, { ...unit, scale: unit.scale / 1000 });
    const each = (width - LEFT) / number, gap = each > 6 ? 1 : 0;
    const colours = phases.map(phaseColour);
    for (let bar = 0; bar < number; bar++) {
      let sum = 0;
      const left = LEFT + bar * each;
      phases.forEach((phase, place) => {
        const value = series.phases[phase][bar];
        if (!value || sum > largest) return;
        context.fillStyle = colours[place];
        const top = at(Math.min(sum + value, largest));
        context.fillRect(left, top, Math.max(each - gap, 0.6), at(sum) - top);
        sum += value;
      });
      if (series.duration[bar] > largest) {
        context.fillStyle = colour("panel");
        context.fillRect(left, at(0.94 * largest), each, 2);
      }
      if (series.slow[bar]) {
        context.fillStyle = colour("accent");
        const top = Math.max(at(series.longest[bar]) - 3, 10), middle = left + each / 2;
        context.beginPath();
        context.moveTo(middle - 4, top - 7);
        context.lineTo(middle + 4, top - 7);
        context.lineTo(middle, top);
        context.fill();
      }
      if (bar === chosen) {
        context.strokeStyle = colour("accent");
        context.lineWidth = 2;
        context.strokeRect(left, 10, Math.max(each - gap, 2), height - 30);
      }
    }
    below(context, width, height, number, (bar) => `${series.number[bar]}`);
  });
  const rows = (bar) => [
    ["duration", micros(series.duration[bar])],
    ...(series.steps > 1 ? [["longest of them", micros(series.longest[bar])]] : []),
    ["of the median", `${(series.longest[bar] / series.median).toFixed(2)} ×`],
    ...phases.filter((phase) => series.phases[phase][bar]).map((phase) => [phase, micros(series.phases[phase][bar])]),
    ...Object.keys(series.rates ?? {}).filter((name) => series.rates[name][bar] !== null).map((name) => ["rate", rate(name, series.rates[name][bar])]),
    ...(series.late?.[bar] != null ? [["late to collectives", micros(series.late[bar])]] : []),
  ];
  const title = (bar) => (series.steps > 1 ? `from step ${series.number[bar]}` : `step ${series.number[bar]}`);
  const at = (event) => Math.floor(((event.offsetX - LEFT) * number) / (drawn.canvas.clientWidth - LEFT));
  const choose = (bar) => {
    chosen = Math.max(0, Math.min(number - 1, bar));
    detail.replaceChildren(make("b", {}, title(chosen)), ` ${rows(chosen).map((row) => row.join(" ")).join(" · ")}`);
    drawn.redraw();
  };
  drawn.canvas.addEventListener("pointermove", (event) => (at(event) >= 0 && at(event) < number ? showTip(event, title(at(event)), rows(at(event))) : hideTip()));
  drawn.canvas.addEventListener("pointerleave", hideTip);
  drawn.canvas.addEventListener("click", (event) => choose(at(event)));
  drawn.canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -number, End: number }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    choose(chosen + move);
  });
  const whole = series.duration.reduce((a, b) => a + b, 0);
  const typical = (name) => series.rates[name].filter((value) => value !== null).sort((a, b) => a - b);
  const speeds = Object.keys(series.rates ?? {}).map((name) => make("span", {}, `median ${rate(name, typical(name)[typical(name).length >> 1])}`));
  parent.append(make("div", { class: "legend" }, ...phases.map((phase) => make("span", {}, swatch(PHASE_COLOURS[phase] ?? "extra"),
    `${phase} ${percent(series.phases[phase].reduce((a, b) => a + b, 0), whole)}`)),
  ...Object.entries(series.pauses).map(([kind, [times, long]]) => make("span", {}, `between steps: ${kind} ${count(times)} ×, ${micros(long)}`)), ...speeds), detail);
  return drawn.redraw;
}

function slowTable(body) {
  const slow = report.explanation?.slow_steps ?? [];
  if (!slow.length) return;
  const unit = unitOf("time", slow[0].seconds * 1e9);
  const rows = slow.map((step) => {
    const more = [...Object.entries(step.more).map(([name, seconds]) => `${name} ${unit.text(seconds * 1e9)}`), ...Object.entries(step.counts).map(([name, number]) => `${count(number)} ${name}`)];
    const name = report.steps.length > 1 ? `${step.rank} step ${step.number}` : `step ${step.number}`;
    return make("tr", {}, make("td", {}, name), make("td", {}, unit.written(step.seconds * 1e9)), make("td", {}, step.ratio.toFixed(2)), make("td", { class: "text" }, more.join(", ") || "nothing that was recorded"));
  });
  const titles = [make("th", { scope: "col" }, "Slowest"), make("th", { scope: "col" }, `Duration, ${unit.unit}`), make("th", { scope: "col" }, "× median"), make("th", { scope: "col", class: "text" }, "What it had that others had not (may overlap)")];
  body.append(make("div", { class: "table stacked" }, make("table", {}, make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...rows))));
}

// ---- the tree of calls ----

const METRICS = {
  time: ["Time", "time"], device: ["Device time", "time"], cpu_memory: ["Allocated memory", "bytes"],
  device_memory: ["Allocated device memory", "bytes"], flops: ["FLOPs", "flops"], calls: ["Calls", "count"],
};

class Tree {
  // Columns of nodes, each behind its parent; the sums of a node are its own and those below it.
  constructor(parent, name, own, folded = new Map()) {
    Object.assign(this, { parent, name, own, folded, sums: {}, children: Array.from(parent, () => []), top: [] });
    for (let node = 0; node < parent.length; node++) (parent[node] < 0 ? this.top : this.children[parent[node]]).push(node);
  }

  total(metric) {
    if (!this.sums[metric]) {
      const totals = Float64Array.from(this.own[metric] ?? new Array(this.parent.length).fill(0));
      for (let node = totals.length - 1; node >= 0; node--) if (this.parent[node] >= 0) totals[this.parent[node]] += totals[node];
      this.sums[metric] = totals;
    }
    return this.sums[metric];
  }

  whole(metric) { return this.top.reduce((sum, node) => sum + this.total(metric)[node], 0); }

  // By what ran: below each name its callers, so that the top row is self time.
  inverted() {
    const parent = [], name = [], columns = Object.keys(this.own), own = Object.fromEntries(columns.map((column) => [column, []]));
    const known = new Map(), folded = new Map();
    for (let node = 0; node < this.parent.length; node++) {
      if (!columns.some((column) => column !== "calls" && this.own[column][node])) continue;
      let place = -1;
      for (let at = node, deep = 0; at >= 0 && deep < 60; at = this.parent[at], deep++) {
        const key = `${place} ${this.name[at]}`;
        let next = known.get(key);
        if (next === undefined) {
          next = parent.length;
          known.set(key, next);
          parent.push(place);
          name.push(this.name[at]);
          columns.forEach((column) => own[column].push(0));
        }
        place = next;
      }
      columns.forEach((column) => { own[column][place] += this.own[column][node]; });
      if (this.folded.has(node)) folded.set(place, (folded.get(place) ?? 0) + this.folded.get(node));
    }
    return new Tree(parent, name, own, folded);
  }

  nameOf(node) {
    return this.name[node] < 0 ? `${count(this.folded.get(node) ?? 0)} more` : report.names[this.name[node]];
  }
}

const ROW = 22;
let searchCalls = () => {};

function calls() {
  const trees = report.trees.map((each) => new Tree(each.parent, each.name, each.own, new Map(each.folded[0].map((node, place) => [node, each.folded[1][place]]))));
  if (!trees[0].parent.length) return;
  const shownPaths = report.trees[0];
  const lead = `${count(shownPaths.shown)} of ${plural(shownPaths.paths, "path")}${shownPaths.shown < shownPaths.paths ? "; the smallest are folded into their parents' “more”, sums stay exact" : ""}. Click, or arrow keys and Enter, to zoom; Escape goes back.`;
  const body = section("calls", "Calls", isDiff ? `${lead} Width is after; colour is the change per step beyond that of the median name.` : lead);
  const state = { tree: trees[0], metric: "time", zoom: -1, focus: -1, query: "", match: null, boxes: [] };

  const forward = trees.slice(), backward = new Map();
  const available = Object.keys(METRICS).filter((metric) => trees[0].own[metric]);
  const source = make("select", { "aria-label": "What is displayed", onchange: reset }, ...report.trees.map((each) => make("option", {}, each.title)));
  const metric = make("select", { "aria-label": "Width", onchange: reset }, ...available.map((each) => make("option", { value: each }, METRICS[each][0])));
  const order = make("select", { "aria-label": "Order", onchange: reset }, make("option", {}, "Callers above"), make("option", {}, "By self, callers below"));
  const search = make("input", { type: "search", placeholder: "Search names ( / )", "aria-label": "Search names", oninput: find });
  const found = make("output", { "aria-live": "polite" });
  const out = make("button", { class: "plain", type: "button", onclick: () => zoomTo(state.zoom < 0 ? -1 : state.tree.parent[state.zoom]) }, "Zoom out");
  const crumbs = make("div", { class: "crumbs" }), detail = make("div", { class: "detail", "aria-live": "polite" });
  body.append(make("div", { class: "controls" }, ...(report.trees.length > 1 ? [source] : []), metric, order, search, out, found), crumbs);
  const box = body.appendChild(make("div", { class: "scroll" }));
  body.append(detail);
  const usedKinds = [...new Set(trees[0].name.map((name) => (name < 0 ? "other" : report.kinds[report.kind_of_name[name]])))];
  body.append(make("div", { class: "legend" }, ...(isDiff ? [["slower", "slower"], ["faster", "faster"]] : usedKinds.map((kind) => [kind, KIND_NAMES[kind]])).map(([name, title]) => make("span", {}, swatch(name), title))));

  function reset() {
    const at = Math.max(0, source.selectedIndex);
    if (order.selectedIndex && !backward.has(at)) backward.set(at, forward[at].inverted());
    state.tree = order.selectedIndex ? backward.get(at) : forward[at];
    state.metric = state.tree.own[metric.value] ? metric.value : "time";
    state.match = null;
    zoomTo(-1);
    find();
  }

  // The boxes of what is zoomed to, row by row; those too narrow to see are not drawn, and neither is what is below them.
  function layout(width) {
    const { tree, metric: by } = state, totals = tree.total(by), boxes = [];
    const whole = state.zoom < 0 ? tree.whole(by) : totals[state.zoom];
    const scale = whole > 0 ? width / whole : 0;
    const place = (nodes, left, row) => {
      for (const node of nodes) {
        const wide = totals[node] * scale;
        if (wide >= 0.7) {
          boxes.push({ node, left, wide, row });
          place(sorted(node), left, row + 1);
        }
        left += Math.max(wide, 0);
      }
    };
    const sorted = (node) => (node < 0 ? tree.top : tree.children[node]).slice().sort((a, b) => totals[b] - totals[a]);
    place(state.zoom < 0 ? sorted(-1) : [state.zoom], 0, 0);
    state.boxes = boxes;
    return ROW * (1 + boxes.reduce((most, each) => Math.max(most, each.row), 0));
  }

  function fill(node) {
    if (!isDiff) return colour(state.tree.name[node] < 0 ? "other" : report.kinds[report.kind_of_name[state.tree.name[node]]]);
    const before = state.tree.total(`before_${state.metric}`)[node] / stepsOf[0], after = state.tree.total(state.metric)[node] / stepsOf[1];
    const common = state.metric === "time" ? report.diff.common : 1;
    const change = before > 0 ? Math.max(-1, Math.min(1, Math.log2(after / before / common) * 2)) : 1;
    return Math.abs(change) < 0.15 ? colour("other") : `color-mix(in srgb, ${colour(change > 0 ? "slower" : "faster")} ${Math.round(60 * Math.abs(change))}%, ${colour("other")})`;
  }

  const colours = new Map();
  const drawn = drawing(box, layout, "Calls by path; use the arrow keys to move, Enter to zoom", (context, width) => {
    colours.clear();
    context.textAlign = "left";
    for (const { node, left, wide, row } of state.boxes) {
      const key = isDiff ? node : state.tree.name[node];
      if (!colours.has(key)) colours.set(key, fill(node));
      const isMatch = state.match?.has(node);
      context.globalAlpha = state.match && !isMatch ? 0.35 : 1;
      context.fillStyle = isMatch ? colour("accent") : colours.get(key);
      context.fillRect(left, row * ROW, Math.max(wide - 1, 0.7), ROW - 1);
      if (wide > 24) {
        context.save();
        context.beginPath();
        context.rect(left, row * ROW, wide - 4, ROW);
        context.clip();
        context.fillStyle = isMatch ? colour("panel") : colour("text");
        context.fillText(state.tree.nameOf(node).slice(0, Math.ceil(wide / 4)), left + 5, row * ROW + ROW / 2);
        context.restore();
      }
      context.globalAlpha = 1;
      if (node === state.focus) {
        context.strokeStyle = colour("accent");
        context.lineWidth = 2;
        context.strokeRect(left + 1, row * ROW + 1, Math.max(wide - 3, 1), ROW - 3);
      }
    }
  });

  function rows(node) {
    const { tree } = state, found = [];
    for (const [name, [title, kind]] of Object.entries(METRICS)) {
      if (!tree.own[name]) continue;
      const total = tree.total(name)[node], own = tree.own[name][node];
      if (name === "calls") found.push(["calls", count(own)]);
      else if (total || name === state.metric) found.push([title.toLowerCase(), `${text(kind, total)}, ${percent(total, tree.whole(name))}; itself ${text(kind, own)}`]);
      if (isDiff && name === state.metric && tree.own[`before_${name}`]) {
        found.push(["a step, before → after", `${text(kind, tree.total(`before_${name}`)[node] / stepsOf[0])} → ${text(kind, total / stepsOf[1])}`]);
      }
    }
    return found;
  }
  const at = (event) => state.boxes.find(({ left, wide, row }) => event.offsetX >= left && event.offsetX < left + wide && Math.floor(event.offsetY / ROW) === row)?.node ?? -1;

  function focusOn(node) {
    state.focus = node;
    if (node >= 0) detail.replaceChildren(make("b", {}, state.tree.nameOf(node)), ` ${rows(node).map((row) => row.join(" ")).join(" · ")}`);
    else detail.replaceChildren("Nothing chosen. Names that take less than a pixel appear when their caller is zoomed.");
    drawn.redraw();
    const placed = state.boxes.find((each) => each.node === node);
    if (placed && (placed.row * ROW < box.scrollTop || (placed.row + 1) * ROW > box.scrollTop + box.clientHeight)) box.scrollTop = (placed.row - 2) * ROW;
  }
  function zoomTo(node) {
    state.zoom = node;
    const path = [];
    for (let each = node; each >= 0; each = state.tree.parent[each]) path.unshift(each);
    const kind = METRICS[state.metric][1];
    const link = (each, label) => make("button", { class: "link", type: "button", onclick: () => zoomTo(each) }, label);
    crumbs.replaceChildren(link(-1, `All: ${text(kind, state.tree.whole(state.metric))}`), ...path.flatMap((each) => [make("span", {}, "›"), link(each, state.tree.nameOf(each))]));
    if (node >= 0) crumbs.append(make("span", {}, `${text(kind, state.tree.total(state.metric)[node])}, ${percent(state.tree.total(state.metric)[node], state.tree.whole(state.metric))}`));
    out.disabled = node < 0;
    hideTip();
    focusOn(node);
  }

  // Names that contain the text, and what they take together; what is below a match is not counted twice.
  function find() {
    state.query = search.value.trim().toLowerCase();
    state.match = null;
    found.textContent = "";
    if (state.query) {
      const { tree } = state, totals = tree.total(state.metric), isName = report.names.map((name) => name.toLowerCase().includes(state.query));
      const covered = new Uint8Array(tree.parent.length), names = new Set();
      state.match = new Set();
      let sum = 0;
      for (let node = 0; node < tree.parent.length; node++) {
        const isAbove = tree.parent[node] >= 0 && covered[tree.parent[node]], isMatch = tree.name[node] >= 0 && isName[tree.name[node]];
        covered[node] = isAbove || isMatch;
        if (!isMatch) continue;
        state.match.add(node);
        names.add(tree.name[node]);
        if (!isAbove) sum += totals[node];
      }
      const left = tree.folded.size ? "; without what is folded" : "";
      found.textContent = `${plural(names.size, "name")}, ${text(METRICS[state.metric][1], sum)}, ${percent(sum, tree.whole(state.metric))}${left}`;
    }
    drawn.redraw();
  }
  searchCalls = (query) => {
    search.value = query;
    find();
    body.scrollIntoView();
  };

  drawn.canvas.addEventListener("pointermove", (event) => (at(event) < 0 ? hideTip() : showTip(event, state.tree.nameOf(at(event)), rows(at(event)))));
  drawn.canvas.addEventListener("pointerleave", hideTip);
  drawn.canvas.addEventListener("click", (event) => {
    const node = at(event);
    if (node >= 0) zoomTo(node === state.zoom ? state.tree.parent[node] : node);
  });
  drawn.canvas.addEventListener("keydown", (event) => {
    const { tree, focus } = state, totals = tree.total(state.metric);
    const largest = (nodes) => nodes.slice().sort((a, b) => totals[b] - totals[a]);
    const around = focus < 0 || focus === state.zoom ? [focus] : largest(tree.parent[focus] < 0 ? tree.top : tree.children[tree.parent[focus]]);
    const beside = (step) => around[Math.max(0, Math.min(around.length - 1, around.indexOf(focus) + step))];
    const actions = {
      ArrowDown: () => focusOn(largest(focus < 0 ? tree.top : tree.children[focus])[0] ?? focus),
      ArrowUp: () => focusOn(focus >= 0 && focus !== state.zoom && tree.parent[focus] >= 0 ? tree.parent[focus] : focus),
      ArrowLeft: () => focusOn(beside(-1)),
      ArrowRight: () => focusOn(beside(1)),
      Enter: () => zoomTo(focus),
      Escape: () => zoomTo(state.zoom < 0 ? -1 : tree.parent[state.zoom]),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.closest("input, select")) return;
    event.preventDefault();
    search.focus();
  });
  // What comes before the first step, imports and set-up, may be longer than all steps together.
  const steps = state.tree.top.find((node) => state.tree.nameOf(node) === "ProfilerStep*");
  const isSmall = steps !== undefined && state.tree.total("time")[steps] < state.tree.whole("time") / 2;
  zoomTo(isSmall ? steps : -1);
}

// ---- the tables of averages ----

const TITLES = { name: "By name", shape: "By name and shapes", module: "By module" };
const HEADINGS = {
  calls: ["Calls", "count"], self: ["Self", "time"], total: ["Total", "time"], self_device: ["Self on device", "time"], device: ["Total on device", "time"],
  self_cpu_memory: ["Self memory", "bytes"], self_device_memory: ["Self device memory", "bytes"], flops: ["FLOPs", "flops"],
};

function tables() {
  if (!report.tables.length || !report.tables[0].name.length) return;
  const body = section("table", "Operators", "The averages of key_averages() and of otel-torchprof show, and their sums. Self is without what is called inside.");
  const group = make("select", { "aria-label": "Rows", onchange: () => fresh() }, ...report.tables.map((each) => make("option", {}, TITLES[each.id])));
  const filter = make("input", { type: "search", placeholder: "Filter rows", "aria-label": "Filter rows", oninput: () => draw() });
  const found = make("output", { "aria-live": "polite" });
  body.append(make("div", { class: "controls" }, ...(report.tables.length > 1 ? [group] : []), filter, found));
  const box = body.appendChild(make("div", { class: "table" }));
  let sortBy = "self", direction = -1, most = 25;
  const fresh = () => { sortBy = "self"; direction = -1; most = 25; draw(); };

  function columnsOf(table) {
    const at = (name) => report.columns.indexOf(name);
    const found = report.columns.filter((name) => table.rows[at(name)].some((value) => value)).map((name) => ({ id: name, title: HEADINGS[name][0], kind: HEADINGS[name][1], values: table.rows[at(name)] }));
    const own = table.rows[at("self")], whole = own.reduce((a, b) => a + b, 0);
    if (table.before) {
      const before = table.before[at("self")].map((value) => value / stepsOf[0]), after = own.map((value) => value / stepsOf[1]);
      return [
        { id: "self", title: "Self a step, after", kind: "time", values: after },
        { id: "before", title: "before", kind: "time", values: before },
        { id: "change", title: "change", kind: "time", values: after.map((value, row) => value - before[row]), isSigned: true },
        ...found.filter((column) => column.id === "calls"),
      ];
    }
    const part = { id: "part", title: "Self, %", kind: "share", values: own.map((value) => (whole ? (100 * value) / whole : 0)) };
    found.splice(found.findIndex((column) => column.id === "self") + 1, 0, part);
    const total = table.rows[at("total")], calls = table.rows[at("calls")];
    const mean = { id: "mean", title: "Mean", kind: "time", values: total.map((value, row) => (calls[row] ? value / calls[row] : 0)) };
    found.splice(found.findIndex((column) => column.id === "total") + 1, 0, mean);
    return found;
  }

  function draw() {
    const table = report.tables[Math.max(0, group.selectedIndex)], columns = columnsOf(table), hasShapes = table.id === "shape";
    const names = table.folded ? [...table.name, `${count(table.folded)} more`] : table.name;
    const query = filter.value.trim().toLowerCase();
    let rows = names.map((_, row) => row).filter((row) => !query || names[row].toLowerCase().includes(query) || (hasShapes && (table.shapes[row] ?? "").toLowerCase().includes(query)));
    const sorted = columns.find((column) => column.id === sortBy);
    rows.sort((a, b) => (sorted ? direction * (sorted.values[a] - sorted.values[b]) : direction * (names[a] < names[b] ? -1 : 1)));
    const matching = rows.length;
    rows = rows.slice(0, most);
    for (const column of columns) {
      const share = { unit: "", written: (value) => value.toFixed(1) };
      const ordered = column.values.map(Math.abs).filter(Boolean).sort((a, b) => b - a), largest = ordered[0] ?? 0;
      const typical = column.id === "mean" ? ordered[ordered.length >> 1] : largest / 20;
      column.unit = column.kind === "share" ? share : unitOf(column.kind, column.kind === "count" ? largest : typical ?? 0);
    }
    const heading = (id, title, isText) => make("th", { scope: "col", class: isText ? "text" : null, "aria-sort": sortBy === id ? (direction < 0 ? "descending" : "ascending") : null },
      make("button", { type: "button", onclick: () => { direction = sortBy === id ? -direction : isText ? 1 : -1; sortBy = id; draw(); } }, title));
    const titles = [heading("name", "Name", true), ...(hasShapes ? [make("th", { scope: "col", class: "text" }, "Shapes")] : []),
      ...columns.map((column) => heading(column.id, column.unit.unit ? `${column.title}, ${column.unit.unit}` : column.title))];
    const cell = (column, row) => {
      const value = column.values[row], shown = make("td", {}, column.isSigned && value > 0 ? `+${column.unit.written(value)}` : value ? column.unit.written(value) : "·");
      if (column.isSigned && value) shown.className = value > 0 ? "slower" : "faster";
      if (column.kind === "share") {
        const bar = make("i");
        bar.style.width = `${Math.max(0, Math.min(100, value))}%`;
        shown.append(make("span", { class: "bar", "aria-hidden": "true" }, bar));
      }
      return shown;
    };
    const lines = rows.map((row) => make("tr", {}, make("td", {}, row < table.name.length ? make("button", { class: "link", type: "button", title: "find in the calls", onclick: () => searchCalls(names[row]) }, names[row]) : names[row]),
      ...(hasShapes ? [make("td", { class: "text" }, table.shapes[row] ?? "")] : []), ...columns.map((column) => cell(column, row))));
    // Totals are nested in one another, and work of a device is in the row of what launched it too.
    const sum = (column) => {
      if (["total", "mean", "device"].includes(column.id)) return "";
      const values = column.id === "self_device" ? report.trees[0].own.device ?? [] : column.values;
      return column.unit.written(values.reduce((a, b) => a + b, 0));
    };
    const foot = make("tr", {}, make("td", {}, "all"), ...(hasShapes ? [make("td")] : []), ...columns.map((column) => make("td", {}, sum(column))));
    box.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...lines), make("tfoot", {}, foot)));
    if (matching > rows.length) box.append(make("p", {}, make("button", { class: "plain", type: "button", onclick: () => { most = most * 8; draw(); } }, `${count(matching - rows.length)} more rows`)));
    found.textContent = query ? plural(matching, "row") : "";
  }
  draw();
}

// ---- memory over time ----

// A time on an axis, in us, without digits that are all the same.
function tick(time, span) {
  const { unit, scale } = unitOf("time", 1000 * span);
  return `${((1000 * time) / scale).toLocaleString("en-US", { maximumFractionDigits: 2 })} ${unit}`;
}

function memory() {
  const ofSteps = (report.steps ?? []).filter((each) => each.memory);
  if (!report.memory.length && !ofSteps.length) return;
  const body = section("memory", "Memory over time", report.memory.length ? "" : "The most of each step; single allocations were not recorded.");
  for (const curve of report.memory) {
    const at = micros(curve.peak[0]), unit = unitOf("bytes", curve.peak[1]);
    const what = curve.is_total ? "in use" : "in use beyond the start of the recording";
    body.append(make("h3", {}, [curve.file, curve.device].filter(Boolean).join(", ")), make("p", { class: "quiet" },
      `Most ${what}: ${unit.text(curve.peak[1])} after ${at}${curve.step == null ? "" : `, in step ${curve.step}`}; ${text("bytes", curve.allocated)} allocated in ${plural(curve.records, "change")}${curve.time.length < curve.records ? `, of which the least and the most of ${count(Math.floor(curve.time.length / 2))} intervals are drawn` : ""}.`));
    lineChart(body, curve.time, [{ name: curve.device, values: curve.bytes }], { kind: "bytes", peak: curve.peak, labelOf: (time, span = 0) => (span ? tick(time, span) : micros(time)) });
    if (curve.held.length) body.append(heldTable(curve));
  }
  if (!report.memory.length) {
    for (const kind of ["process", "device"]) {
      const lines = ofSteps.filter((series) => series.memory[kind]).map((series) => {
        const known = series.number.map((_, place) => place).filter((place) => series.memory[kind][place] !== null);
        return { name: series.name, places: known.map((place) => series.number[place]), values: known.map((place) => series.memory[kind][place]) };
      });
      if (!lines.length) continue;
      body.append(make("h3", {}, kind === "process" ? "Resident memory of the process" : "Allocated on the device"));
      lineChart(body, lines[0].places, lines, { kind: "bytes", labelOf: (step, span) => (span ? `${Math.round(step)}` : `step ${step}`) });
    }
  }
}
function heldTable(curve) {
  const unit = unitOf("bytes", Math.max(...curve.held.map((each) => each[3])));
  const rows = curve.held.map(([phase, module, operator, bytes, blocks]) => make("tr", {}, make("td", {}, operator || "(no operator)"), make("td", { class: "text" }, [phase, module].filter(Boolean).join(", ")),
    make("td", {}, unit.written(bytes)), make("td", {}, percent(bytes, curve.peak[1])), make("td", {}, count(blocks))));
  const titles = ["Allocated by, in use at the peak", "Where", unit.unit, "Of the peak", "Blocks"].map((title, place) => make("th", { scope: "col", class: place === 1 ? "text" : null }, title));
  return make("div", { class: "table" }, make("table", {}, make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...rows)));
}
const LINES = ["forward", "optimizer", "collective", "data", "backward-phase", "compile", "gc", "checkpoint"];
function lineChart(parent, places, lines, { kind, peak, labelOf }) {
  const first = places[0], last = places.at(-1), width = () => drawn.canvas.clientWidth - LEFT;
  const lowest = Math.min(0, ...lines.flatMap((line) => line.values)), largest = Math.max(...lines.flatMap((line) => line.values)) * 1.08 || 1;
  let chosen = -1;
  const detail = make("div", { class: "detail", "aria-live": "polite" });
  const drawn = drawing(parent, 200, `Memory over time, at most ${text(kind, largest)}`, (context, wide, height) => {
    const at = axis(context, wide, height, largest - lowest, unitOf(kind, largest - lowest));
    const x = (place) => LEFT + ((wide - LEFT) * (place - first)) / (last - first || 1);
    for (const line of lines) {
      const path = new Path2D();
      line.values.forEach((value, place) => {
        const from = x((line.places ?? places)[place]);
        if (place) path.lineTo(from, at(line.values[place - 1] - lowest));
        path.lineTo(from, at(value - lowest));
      });
      context.strokeStyle = colour(LINES[lines.indexOf(line) % LINES.length]);
      context.lineWidth = 1.2;
      context.stroke(path);
      if (lines.length > 1) continue;
      path.lineTo(x((line.places ?? places).at(-1)), at(0));
      path.lineTo(x((line.places ?? places)[0]), at(0));
      context.globalAlpha = 0.18;
      context.fillStyle = colour("forward");
      context.fill(path);
      context.globalAlpha = 1;
    }
    const marked = chosen >= 0 ? [places[chosen], lines[0].values[chosen]] : peak;
    if (marked) {
      context.fillStyle = colour("accent");
      context.beginPath();
      context.arc(x(marked[0]), at(marked[1] - lowest), 4, 0, 7);
      context.fill();
    }
    const span = last - first, rough = span / Math.max(2, (wide - LEFT) / 110), power = 10 ** Math.floor(Math.log10(rough || 1));
    const each = ([1, 2, 5, 10].find((step) => step * power >= rough) ?? 10) * power;
    context.fillStyle = colour("quiet");
    context.textAlign = "center";
    for (let place = Math.ceil(first / each) * each; place <= last - each * 0.2; place += each) context.fillText(labelOf(place, span), x(place), height - 8);
  });
  const near = (event) => {
    const place = first + ((event.offsetX - LEFT) * (last - first)) / width();
    let low = 0, high = places.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (places[middle] <= place) low = middle;
      else high = middle - 1;
    }
    return low;
  };
  const label = (place) => labelOf(places[place]);
  drawn.canvas.addEventListener("pointermove", (event) => showTip(event, label(near(event)), lines.map((line) => [line.name, text(kind, line.values[near(event)])])));
  drawn.canvas.addEventListener("pointerleave", hideTip);
  drawn.canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (!move) return;
    event.preventDefault();
    chosen = Math.max(0, Math.min(places.length - 1, chosen + move));
    detail.textContent = `${label(chosen)}: ${lines.map((line) => text(kind, line.values[chosen])).join(", ")}`;
    drawn.redraw();
  });
  if (lines.length > 1) parent.append(make("div", { class: "legend" }, ...lines.map((line, place) => make("span", {}, swatch(LINES[place % LINES.length]), line.name))));
  parent.append(detail);
}

// ---- ranks by steps ----

function ranks() {
  const all = report.steps ?? [];
  if (isDiff || all.length < 2) return;
  const body = section("ranks", "Ranks", `Rank by step: the stronger the colour, the longer; without one it is not known.${all[0].steps > 1 ? ` Each cell is ${count(all[0].steps)} steps.` : ""}`);
  const kinds = { duration: ["Duration", (each) => each.longest], wait: ["Wait for other ranks", (each) => each.phases.collective ?? each.early], late: ["Lateness to collectives", (each) => each.late] };
  const known = Object.keys(kinds).filter((kind) => all.some((each) => kinds[kind][1](each)));
  const missing = Object.keys(kinds).filter((kind) => !known.includes(kind)).map((kind) => kinds[kind][0].toLowerCase());
  const choice = make("select", { "aria-label": "What is displayed", onchange: () => drawn.redraw() }, ...known.map((kind) => make("option", { value: kind }, kinds[kind][0])));
  choice.value = known.includes("late") ? "late" : known.includes("wait") ? "wait" : "duration";
  const scale = make("output", { class: "quiet" });
  body.append(make("div", { class: "controls" }, choice, scale));
  if (missing.length) body.append(make("p", { class: "quiet" }, `Not in the recording: ${missing.join(", ")}.`));
  const numbers = [...new Set(all.flatMap((each) => each.number))].sort((a, b) => a - b), column = new Map(numbers.map((number, place) => [number, place]));
  const tall = Math.max(14, Math.min(28, 480 / all.length)), wide = 76;
  const valuesOf = (each) => kinds[choice.value][1](each) ?? [];
  const detail = make("div", { class: "detail", "aria-live": "polite" }, "Tap a cell, or use the arrow keys.");
  let chosen = [0, -1];
  const drawn = drawing(body, () => tall * all.length + 22, "Ranks by steps", (context, width, height) => {
    const sorted = all.flatMap((each) => valuesOf(each).filter((value) => value !== null)).sort((a, b) => a - b);
    const largest = Math.max(sorted[Math.floor(0.98 * (sorted.length - 1))] ?? 0, 1), cell = (width - wide) / numbers.length;
    scale.textContent = `from ${micros(Math.max(0, sorted[0] ?? 0))} to ${micros(largest)}${sorted.at(-1) > largest ? `; longest ${micros(sorted.at(-1))}` : ""}`;
    all.forEach((each, row) => {
      context.globalAlpha = 1;
      context.fillStyle = colour("quiet");
      context.textAlign = "left";
      context.fillText(each.name.slice(0, 12), 0, (row + 0.5) * tall);
      valuesOf(each).forEach((value, place) => {
        if (value === null) return;
        context.globalAlpha = 0.06 + 0.94 * Math.max(0, Math.min(1, value / largest));
        context.fillStyle = colour("accent");
        context.fillRect(wide + column.get(each.number[place]) * cell, row * tall, Math.max(cell, 0.8), tall - 1);
      });
    });
    context.globalAlpha = 1;
    if (chosen[1] >= 0) {
      context.strokeStyle = colour("text");
      context.lineWidth = 1.5;
      context.strokeRect(wide + chosen[1] * cell, chosen[0] * tall, Math.max(cell, 2), tall - 1);
    }
    const labels = Math.max(1, Math.ceil(numbers.length / Math.floor((width - wide) / 90)));
    context.fillStyle = colour("quiet");
    numbers.forEach((number, place) => { if (place % labels === 0) context.fillText(`${number}`, wide + place * cell, height - 9); });
  });
  const told = (each, at) => known.map((kind) => [kinds[kind][0].toLowerCase(), kinds[kind][1](each)?.[at] == null ? "not known" : micros(kinds[kind][1](each)[at])]);
  const cellAt = (event) => {
    const row = Math.floor(event.offsetY / tall), place = Math.floor(((event.offsetX - wide) * numbers.length) / (drawn.canvas.clientWidth - wide));
    return [row, place, all[row]?.number.indexOf(numbers[place]) ?? -1];
  };
  const choose = (row, place) => {
    chosen = [Math.max(0, Math.min(all.length - 1, row)), Math.max(0, Math.min(numbers.length - 1, place))];
    const each = all[chosen[0]], number = numbers[chosen[1]], at = each.number.indexOf(number);
    detail.replaceChildren(make("b", {}, `${each.name}, step ${number}`), at < 0 ? " was not recorded" : ` ${told(each, at).map((row) => row.join(" ")).join(" · ")}`);
    drawn.redraw();
  };
  drawn.canvas.addEventListener("pointermove", (event) => {
    const [row, place, at] = cellAt(event);
    if (at < 0) hideTip();
    else showTip(event, `${all[row].name}, step ${numbers[place]}`, told(all[row], at));
  });
  drawn.canvas.addEventListener("pointerleave", hideTip);
  drawn.canvas.addEventListener("click", (event) => choose(...cellAt(event)));
  drawn.canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    choose(chosen[0] + move[0], chosen[1] + move[1]);
  });
  body.append(detail);
  const unit = unitOf("time", 1000 * Math.max(...all.map((each) => each.median)));
  const mean = (values) => (values ? values.reduce((a, b) => a + Math.max(b ?? 0, 0), 0) / values.length : null);
  const shown = all.map((each) => make("tr", {}, make("td", {}, each.name), make("td", {}, count(each.count)), make("td", {}, unit.written(1000 * each.median)),
    ...["wait", "late"].filter((kind) => known.includes(kind)).map((kind) => make("td", {}, unit.written(1000 * (mean(kinds[kind][1](each)) ?? 0))))));
  const titles = ["Rank", "Steps", `Median step, ${unit.unit}`, ...["wait", "late"].filter((kind) => known.includes(kind)).map((kind) => `${kind === "wait" ? "Mean wait" : "Mean lateness"}, ${unit.unit}`)];
  body.append(make("div", { class: "table" }, make("table", {}, make("thead", {}, make("tr", {}, ...titles.map((title) => make("th", { scope: "col" }, title)))), make("tbody", {}, ...shown))));
}

// ---- what is missing, and why ----

function notes() {
  const absent = Object.entries(report.absent);
  if (absent.length || report.notes.length) {
    const body = section("notes", "Not in this report");
    body.append(make("ul", { class: "notes" }, ...absent.map(([what, why]) => make("li", {}, `${what}: ${why}`)), ...report.notes.map((note) => make("li", {}, note))));
  }
  main.append(make("footer", {}, `otel-torchprof ${report.version}. This file needs no network and allows none.`));
}

main.replaceChildren();
head();
for (const draw of [verdict, changes, steps, calls, tables, memory, ranks, notes]) draw();
