// The picture: what is chosen, what follows from it, and the keyboard.
const MOST_LINES = 30; // that are drawn at first [chosen]
const ENOUGH = 0.9; // of the measured influence inside a set: its lines are drawn at first [chosen]
const MOST_EVER = 400; // that a page can show and move [chosen]

infoflow.Picture = class {
  constructor(root, data, css, number, first = true) {
    this.data = data;
    this.root = root;
    // whole pages are ours, with their address; notebooks are not
    this.alone = first
      && Boolean(document.querySelector('meta[name="generator"][content^="infoflow-lens"]'));
    this.number = number;
    this.places = { first: [], all: new Set() };
    const shadow = root.attachShadow({ mode: "open" });
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(css);
    shadow.adoptedStyleSheets = [sheet];
    // d3 takes the namespace from the parent, and a shadow root has none
    const box = shadow.appendChild(document.createElement("div"));
    this.box = d3.select(box).attr("class", "picture")
      .attr("role", "group").attr("aria-label", data.title);
    this.cache = new Map();
    this.state = {
      input: 0, rule: Object.keys(data.rules)[0], k: data.k, layer: 0, position: 0, most: null,
      cursor: null, hover: null, head: null, line: null, off: [], swap: null,
      find: "", clicks: "open",
    };
    this.build();
    this.watchTheme();
    this.ready = this.show(data.first, data.selected).then(() => this.restore())
      .then(() => { this.settled = true; });
  }

  // The picture follows the page that it stands in: notebooks and sites have switches of their own.
  watchTheme() {
    const apply = () => {
      const body = document.body.dataset, html = document.documentElement.dataset;
      const scheme = body.mdColorScheme || html.theme || body.theme;
      const dark = body.jpThemeLight ? body.jpThemeLight === "false"
        : body.vscodeThemeKind ? body.vscodeThemeKind.includes("dark")
        : scheme ? ["slate", "dark"].includes(scheme) : null;
      if (dark === null) delete this.root.dataset.scheme;
      else this.root.dataset.scheme = dark ? "dark" : "light";
      if (this.input) this.draw();
    };
    new MutationObserver(apply).observe(document.body, { attributes: true });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
    apply();
  }

  group() {
    const at = this.state.input;
    return this.data.groups.find((g) => at >= g.first && at < g.first + g.count)
      || { first: 0, count: this.data.inputs.length };
  }

  async show(index, selected) {
    const { data, state } = this;
    if (!this.cache.has(index)) this.cache.set(index, await infoflow.unpack(data.inputs[index]));
    const before = this.input, input = this.cache.get(index);
    state.input = index;
    this.input = input;
    const same = before && before.heads.join() === input.heads.join();
    if (!same) state.off = input.heads.map(() => new Set());
    const kept = before && before.n_queries === input.n_queries && same;
    if (!kept) {
      state.layer = selected ? selected[0] : input.heads.length - 1;
      state.position = state.query = selected ? selected[1] : input.n_queries - 1;
    }
    if (state.head && (state.head[0] >= input.heads.length
      || state.head[1] >= input.heads[state.head[0]])) state.head = null;
    state.cursor = state.hover = state.line = state.swap = null;
    this.places = this.occurrences(state.find);
    this.update();
    this.revealed = false;
    this.reveal();
  }

  update() {
    const { data, input, state } = this;
    const rule = state.rule === "mechanisms" && !input.mechanisms ? "max_position" : state.rule;
    this.rule = rule;
    const depth = Math.max(...input.depths);
    state.k = Math.max(1, Math.min(state.k, depth));
    const moved = [state.input, rule, state.k, ...state.off.map((heads) => [...heads])].join(";");
    if (moved !== this.moved) this.found = infoflow.propagate(input, rule, state.k, state.off);
    this.moved = moved;
    this.measure();
    this.trace();
    this.k.attr("hidden", rule === "top_k" ? null : true);
    this.k.select("input").attr("max", depth).property("value", state.k);
    this.k.select("output").text(state.k);
    this.layer.select("input").attr("max", input.heads.length - 1)
      .property("value", Math.max(state.layer, 0));
    this.layer.select("output").text(state.layer < 0 ? "–" : state.layer);
    this.rules.property("value", rule).selectAll("option")
      .property("disabled", (r) => r[0] === "mechanisms" && !input.mechanisms);
    const group = this.group();
    if (this.groupButtons)
      this.groupButtons.attr("aria-pressed", (g) => String(g.first === group.first));
    if (this.inputs)
      this.inputs.selectAll("option")
        .data(data.inputs.slice(group.first, group.first + group.count), (_, i) => group.first + i)
        .join("option").attr("value", (_, i) => group.first + i)
        .text((d, i) => d.name || `${i + 1}: ${d.tokens.join(" ").slice(0, 40)}`)
        .property("selected", (_, i) => group.first + i === state.input);
    this.drawMost();
    this.draw();
    this.drawTable();
    this.drawNext();
    this.say();
    this.countMatches();
    this.point(state.hover); // what the tip says depends on the chosen state
    if (this.changed) this.changed();
  }

  // Where more or fewer lines are drawn, and all else stays.
  updateLines() {
    this.choose();
    this.drawMost();
    this.drawStates();
    if (this.many()) this.drawStrips(); // whose canvas has the other states
    this.drawLines();
    this.say();
    this.keep();
    if (this.changed) this.changed();
  }

  // All paths of the chosen state.
  trace() {
    const { input, state } = this;
    this.paths = infoflow.paths(input, this.rule, state.k, state.off, this.found, state,
      this.paths && this.paths.lines);
    const { lines } = this.paths;
    this.order = infoflow.strongest(this.paths, MOST_EVER);
    this.reached = this.total > 0 ? infoflow.reach(this.paths, this.order, (s) =>
      this.counts(s) ? this.values[s] : 0) : null;
    this.strongest = 0;
    this.usedHeads = input.heads.map((n) => new Uint8Array(n));
    for (let i = 0; i < lines.length; i++) {
      this.strongest = Math.max(this.strongest, lines.strength[i]);
      this.usedHeads[lines.layer[i]][lines.head[i]] = 1;
    }
    this.choose();
  }

  // Which of the lines are drawn: the strongest, as many as were asked for; else as many as reach
  // enough of the influence.
  choose() {
    const { state, order, reached } = this;
    const enough = reached ? reached.findIndex((share) => share >= ENOUGH - 1e-6) + 1 : 0;
    this.drawn = order.slice(0, state.most ?? Math.min(enough || MOST_LINES, MOST_LINES));
    this.isDrawn = new Set(this.drawn);
    this.residual = infoflow.residual(this.paths, this.drawn);
    this.onPath = infoflow.touched(this.paths, this.drawn, this.residual);
  }

  drawMost() {
    const all = this.paths.lines.length, most = Math.max(1, Math.min(all, MOST_EVER));
    const shown = `${this.drawn.length} of ${all}`;
    this.most.select("input").attr("max", most).attr("aria-valuetext", shown)
      .property("value", this.drawn.length).property("disabled", all < 2);
    this.enough.attr("aria-pressed", String(this.state.most === null))
      .attr("hidden", this.reached ? null : true);
    this.most.select("output").text(shown);
  }

  // Influence on the chosen state: of each source, the largest of other tokens, and their sum.
  measure() {
    const { input, state } = this, n = input.tokens.length;
    this.leftOut = new Set(input.left_out);
    this.values = new Float32Array(n).fill(NaN);
    if (input.influence && state.layer >= 0)
      for (let s = 0; s < n; s++) this.values[s] = this.influence(state.layer, state.position, s);
    this.largest = this.largestOther(this.values);
    this.total = 0;
    this.values.forEach((v, s) => { if (this.counts(s) && v > 0) this.total += v; });
  }

  // Whether a token is a candidate: neither the state's own nor left out.
  counts(source) { return source !== this.state.position && !this.leftOut.has(source); }

  influence(layer, position, source) {
    const { input } = this, row = layer * input.n_queries + position;
    return input.largest[row] * input.influence[row * input.tokens.length + source];
  }

  largestOther(values) {
    let largest = NaN;
    values.forEach((v, s) => {
      if (this.counts(s) && !Number.isNaN(v)) largest = Math.max(largest || 0, v);
    });
    return largest;
  }

  share(source) {
    const { values, largest } = this;
    return Number.isNaN(values[source]) || this.leftOut.has(source) ? NaN
      : largest > 0 ? Math.min(1, values[source] / largest) : 0;
  }

  inSet(source) {
    const { state, found } = this;
    return Boolean(state.layer < 0 ? source === state.position
      : infoflow.has(found.sets[state.layer + 1], found.words, state.position, source));
  }

  token(position) {
    const { tokens, n_queries: n } = this.input;
    return position < tokens.length ? tokens[position]
      : n === tokens.length + 1 ? "CLS" : `state ${position}`;
  }

  stateName(layer, position) {
    return layer < 0 ? `token ${position}, “${this.token(position)}”`
      : `the state after layer ${layer} at position ${position}, “${this.token(position)}”`;
  }

  // A chosen token is the one that is replaced, too.
  select(layer, position) {
    const { state } = this;
    if (state.layer >= 0) state.query = state.position;
    if (layer < 0) state.swap = position;
    Object.assign(state, { layer, position });
    this.update();
  }

  point(at) {
    this.pointQuietly(at);
    if (this.pointed) this.pointed(at);
    this.tell(at && { text: this.describe(at.layer, at.position), x: at.x, y: at.y });
  }

  pointQuietly(at) {
    const before = this.state.hover, same = before && at && before.layer === at.layer
      && before.position === at.position;
    this.state.hover = at;
    if (!same && (before || at)) {
      const tokens = [before, at].some((one) => one && one.layer < 0);
      if (tokens) this.drawLines();
      this.mark();
    }
  }

  key(event, node) {
    const { input, state } = this;
    const cursor = state.cursor || { layer: state.layer, position: state.position };
    const moves = {
      ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0],
      Home: [0, -Infinity], End: [0, Infinity],
    };
    const within = (x, low, high) => Math.max(low, Math.min(high, x));
    if (moves[event.key]) {
      event.preventDefault();
      const [up, right] = moves[event.key];
      const layer = within(cursor.layer + up, -1, input.heads.length - 1);
      const last = (layer < 0 ? input.tokens.length : input.n_queries) - 1;
      const position = within(cursor.position + right, 0, last);
      state.cursor = { layer, position };
      this.drawStates();
      const box = node.getBoundingClientRect();
      this.point({
        layer, position, x: box.left + this.x(position), y: box.top + this.y(layer),
      });
      this.status.text(`At ${this.stateName(layer, position)}; Enter chooses it.`);
      this.reveal(position);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (state.cursor) this.select(state.cursor.layer, state.cursor.position);
    } else if (event.key === "Escape") {
      state.cursor = state.head = state.line = null;
      this.point(null);
      this.update();
    }
  }
};
