// The flame graph: the tree of calls by path.

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
  const body = section("calls", "Calls", isDiff ? `${lead} Width is after; colour is the change per step beyond that of a typical operator.` : lead);
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
