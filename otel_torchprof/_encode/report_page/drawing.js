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

// What rounds to zero has no sign; the sign of other changes is always written.
const unsignedZero = (shown) => (/[1-9]/.test(shown) ? shown : shown.replace(/^[-−+]/, ""));
const signed = (shown) => unsignedZero(shown.startsWith("-") ? `−${shown.slice(1)}` : `+${shown}`);

// One unit for a column or an axis, chosen by its largest value, and the function that writes a value in it.
function unitOf(kind, largest) {
  const [unit, scale] = SCALES[kind].find(([, size]) => largest >= size) ?? SCALES[kind].at(-1);
  const digits = kind === "count" || unit === "B" ? 0 : largest / scale >= 100 ? 1 : 2;
  const written = (value) =>
    unsignedZero((value / scale).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
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
