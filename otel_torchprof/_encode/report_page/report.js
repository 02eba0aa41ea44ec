// The sections of the page, from top to bottom.

// ---- the head: what was found, in one sentence ----

function head() {
  const served = report.requests && `${plural(report.requests.count, "request")}, median ${micros(report.requests.median)}, longest ${micros(Math.max(...report.requests.longest))}`;
  const found = report.headline || served || (report.absent["Verdict and steps"] ? "No verdict: the recording has no steps" : "No verdict");
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
  const lead = `${ranks}${plural(answer.steps, "step")}${answer.left_out_steps ? ` (the first of ${count(answer.steps + answer.left_out_steps)})` : ""}, ${count(answer.steady_steps)} of them steady${answer.steady_steps ? `, median ${text("time", answer.step_median_seconds * 1e9)}` : ""}.${busy}${answer.step_rule ? ` ${answer.step_rule}.` : ""}`;
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
  const stake = finding.recoverable_seconds ? [make("dt", {}, "At stake"), make("dd", {}, `at most ${finding.step_seconds ? `${text("time", finding.step_seconds * 1e9)} a step, ` : ""}${text("time", finding.recoverable_seconds * 1e9)} of the recording`)] : [];
  return make("div", { class: `finding${isFault ? " fault" : ""}` }, make("strong", {}, sentence), make("span", { class: "tag" }, tags.join(" · ")),
    make("ul", {}, ...finding.evidence.map((line) => make("li", {}, line))),
    make("dl", {}, ...stake, make("dt", {}, "Next"), make("dd", {}, finding.next_action), make("dt", {}, "Check"), make("dd", {}, finding.check)));
}

// ---- what changed between two recordings ----

function changes() {
  const found = report.diff;
  if (!found) return;
  const ratio = (value) => `${signed((100 * (value - 1)).toFixed(1))} %`;
  const lead = `A median step ${ratio(found.ratio)} (95 % interval ${ratio(found.interval[0])} to ${ratio(found.interval[1])}); a typical operator ${ratio(found.common)}. Times are self time per step.`;
  const body = section("changes", "What changed", lead);
  const unit = unitOf("time", 1e9 * Math.max(0, ...found.changes.flatMap((each) => [each.before, each.after])));
  if (found.changes.length) {
    const rows = found.changes.map((each) => {
      const isNew = each.calls_before === 0, isOver = each.calls_after === 0;
      const moved = isNew ? "new" : isOver ? "vanished" : ratio(each.after / each.before);
      return make("tr", {}, make("td", {}, each.path.length ? each.path.join(" › ") : each.name), make("td", {}, unit.written(each.before * 1e9)),
        make("td", {}, unit.written(each.after * 1e9)), make("td", { class: each.share > 0 ? "slower" : "faster" }, moved),
        make("td", {}, signed((100 * each.share).toFixed(1))));
    });
    const titles = ["Name", `Before, ${unit.unit}`, `After, ${unit.unit}`, "Change", "Of the step, beyond a typical operator, %"].map((title) => make("th", { scope: "col" }, title));
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
  const draw = (series) => stepCharts(pictures, series);
  draw(shown);
  slowTable(body);
}

// A first step that compiles would flatten all others: bars are cut, unless they are wanted whole.
function stepCharts(pictures, series) {
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
}

// ---- the requests of a service ----

function requests() {
  const series = report.requests;
  if (!series) return;
  const slow = series.slow.reduce((a, b) => a + b, 0);
  const together = series.steps > 1 ? ` Each bar is the mean of ${count(series.steps)} requests.` : "";
  const body = section("requests", "Requests", `${plural(series.count, "trace")}; ${count(slow)} took 3 medians of those of their name or more and ${slow === 1 ? "has" : "have"} a mark.${together}`);
  stepCharts(body.appendChild(make("div")), [{ ...series, noun: "request" }]);
  if (!series.slowest.length) return;
  const unit = unitOf("time", 1e9 * series.slowest[0][3]);
  const rows = series.slowest.map(([number, name, trace, seconds, ratio]) => make("tr", {}, make("td", {}, `request ${number}`), make("td", {}, unit.written(1e9 * seconds)),
    make("td", {}, ratio.toFixed(2)), make("td", { class: "text" }, name), make("td", { class: "text" }, trace)));
  const titles = ["Slowest", `Duration, ${unit.unit}`, "× median", "Name", "Trace"].map((title, place) => make("th", { scope: "col", class: place > 2 ? "text" : null }, title));
  body.append(make("div", { class: "table stacked" }, make("table", {}, make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...rows))));
}

const rate = (name, value) => (name === "mfu" ? `MFU ${value < 0.01 ? `${(100 * value).toPrecision(2)} %` : percent(value, 1)}` : name === "flops" ? `${text("flops", value)}/s` : `${count(Math.round(value))} ${name}/s`);

function stepChart(parent, series, largestOf) {
  const number = series.duration.length;
  const phases = Object.keys(series.phases);
  let chosen = -1;
  const detail = make("div", { class: "detail", "aria-live": "polite" }, "Tap a bar, or use the arrow keys, for what is in it.");
  const drawn = drawing(parent, 220, `${series.name}: durations of ${number} ${series.noun ?? "step"}s by phase`, (context, width, height) => {
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
    below(context, width, height, number, (bar) => (series.noun ? tick(series.start[bar], series.start.at(-1)) : `${series.number[bar]}`));
  });
  const rows = (bar) => [
    ["duration", micros(series.duration[bar])],
    ...(series.steps > 1 ? [["longest of them", micros(series.longest[bar])]] : []),
    ["of the median", `${(series.longest[bar] / series.median).toFixed(2)} ×`],
    ...phases.filter((phase) => series.phases[phase][bar]).map((phase) => [phase, micros(series.phases[phase][bar])]),
    ...Object.keys(series.rates ?? {}).filter((name) => series.rates[name][bar] !== null).map((name) => ["rate", rate(name, series.rates[name][bar])]),
    ...(series.late?.[bar] != null ? [["late to collectives", micros(series.late[bar])]] : []),
  ];
  const title = (bar) => `${series.steps > 1 ? "from " : ""}${series.noun ?? "step"} ${series.number[bar]}`;
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

// ---- the tables of averages ----

const TITLES = { name: "By name", shape: "By name and shapes", module: "By module" };
const HEADINGS = {
  calls: ["Calls", "count"], self: ["Self", "time"], total: ["Total", "time"], self_device: ["Self on device", "time"], device: ["Total on device", "time"],
  self_cpu_memory: ["Self memory", "bytes"], self_device_memory: ["Self device memory", "bytes"], flops: ["FLOPs", "flops"],
};

function tables() {
  if (!report.tables.length || !report.tables[0].name.length) return;
  const isOver = report.tables[0].rows[report.columns.indexOf("self")].some((value) => value < 0) ? " It is below 0, as in torch, where a label begins and ends inside of other calls, as in those of its __enter__ and __exit__: both are taken off." : "";
  const body = section("table", "Operators", `The averages of key_averages() and of otel-torchprof show, and their sums. Self is without what is called inside.${isOver}`);
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
      const value = column.values[row], shown = make("td", {}, value ? (column.isSigned ? signed : String)(column.unit.written(value)) : "·");
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
    if (curve.categories) categories(body, curve);
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
const CATEGORIES = {
  parameter: "optimizer", "optimizer state": "data", input: "extra", temporary: "backward-phase", activation: "collective", gradient: "forward",
  "autograd detail": "compile", unknown: "unattributed",
};
function categories(body, { categories: { time, ...sums }, began }) {
  const lines = Object.keys(CATEGORIES).filter((name) => sums[name]).map((name) => ({ name, values: sums[name], colour: CATEGORIES[name] }));
  if (!lines.length) return;
  body.append(make("h3", {}, "By what it is for, with what was there before"));
  lineChart(body, time.map((each) => each - began), lines, { kind: "bytes", isStacked: true, labelOf: (at, span = 0) => (span ? tick(at, span) : micros(at)) });
}
function heldTable(curve) {
  const unit = unitOf("bytes", Math.max(...curve.held.map((each) => each[3])));
  const rows = curve.held.map(([phase, module, operator, bytes, blocks]) => make("tr", {}, make("td", {}, operator || "(no operator)"), make("td", { class: "text" }, [phase, module].filter(Boolean).join(", ")),
    make("td", {}, unit.written(bytes)), make("td", {}, percent(bytes, curve.peak[1])), make("td", {}, count(blocks))));
  const titles = ["Allocated by, in use at the peak", "Where", unit.unit, "Of the peak", "Blocks"].map((title, place) => make("th", { scope: "col", class: place === 1 ? "text" : null }, title));
  return make("div", { class: "table" }, make("table", {}, make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...rows)));
}
const LINES = ["forward", "optimizer", "collective", "data", "backward-phase", "compile", "gc", "checkpoint"];
// Lines over time; stacked ones are areas, each above those before it.
function lineChart(parent, places, lines, { kind, peak, labelOf, isStacked = false }) {
  const first = places[0], last = places.at(-1), width = () => drawn.canvas.clientWidth - LEFT;
  const heights = isStacked ? lines.map((_, line) => places.map((_, place) => lines.slice(0, line + 1).reduce((sum, each) => sum + each.values[place], 0))) : lines.map((line) => line.values);
  const lowest = Math.min(0, ...heights.flat()), largest = Math.max(...heights.flat()) * 1.08 || 1;
  const colourOf = (line) => lines[line].colour ?? LINES[line % LINES.length];
  let chosen = -1;
  const detail = make("div", { class: "detail", "aria-live": "polite" });
  const drawn = drawing(parent, 200, `Memory over time, at most ${text(kind, largest)}`, (context, wide, height) => {
    const at = axis(context, wide, height, largest - lowest, unitOf(kind, largest - lowest));
    const x = (place) => LEFT + ((wide - LEFT) * (place - first)) / (last - first || 1);
    for (let line = lines.length - 1; line >= 0; line--) {
      const path = new Path2D(), values = heights[line], of = lines[line].places ?? places;
      values.forEach((value, place) => {
        const from = x(of[place]);
        if (place) path.lineTo(from, at(values[place - 1] - lowest));
        path.lineTo(from, at(value - lowest));
      });
      context.strokeStyle = context.fillStyle = colour(colourOf(line));
      context.lineWidth = 1.2;
      context.stroke(path);
      if (lines.length > 1 && !isStacked) continue;
      path.lineTo(x(of.at(-1)), at(0));
      path.lineTo(x(of[0]), at(0));
      context.globalAlpha = isStacked ? 1 : 0.18;
      context.fill(path);
      context.globalAlpha = 1;
    }
    const marked = chosen >= 0 ? [places[chosen], heights.at(isStacked ? -1 : 0)[chosen]] : peak;
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
    detail.textContent = `${label(chosen)}: ${lines.map((line) => (isStacked ? `${line.name} ` : "") + text(kind, line.values[chosen])).join(", ")}`;
    drawn.redraw();
  });
  if (lines.length > 1) parent.append(make("div", { class: "legend" }, ...lines.map((line, place) => make("span", {}, swatch(colourOf(place)), line.name))));
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
    numbers.forEach((number, place) => {
      if (place % labels) return;
      const left = wide + place * cell;
      context.textAlign = left + context.measureText(`${number}`).width > width ? "right" : "left";
      context.fillText(`${number}`, context.textAlign === "right" ? width : left, height - 9);
    });
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
for (const draw of [verdict, changes, steps, requests, calls, tables, memory, ranks, notes]) draw();
