// The interactive picture of information flow. Needs d3 (selection, path, shape, format).
const infoflow = {};
infoflow.number = d3.format(".3~g");
infoflow.percent = (x) => d3.format(x > 0 && x < 0.01 ? ".1%" : ".0%")(x);

// ---- data -------------------------------------------------------------------------------------

infoflow.halves = (() => {
  let table = null; // all 65536 float16 numbers
  return () => {
    if (table) return table;
    table = new Float32Array(65536);
    for (let bits = 0; bits < 65536; bits++) {
      const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, rest = bits & 1023;
      table[bits] = exponent === 0 ? sign * rest * 2 ** -24
        : exponent === 31 ? (rest ? NaN : sign * Infinity)
        : sign * (1 + rest / 1024) * 2 ** (exponent - 15);
    }
    return table;
  };
})();

infoflow.unpack = async function (packed) {
  const bytes = Uint8Array.from(atob(packed.blob), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const half = infoflow.halves();
  const read = ([kind, start, count]) => {
    const view = new DataView(buffer, start);
    if (kind === "key8") return Int32Array.from(new Uint8Array(buffer, start, count), (v) => v - 1);
    if (kind === "share8")
      return Float32Array.from(new Uint8Array(buffer, start, count), (v) => (v / 255) ** 2);
    const out = kind === "key16" ? new Int32Array(count) : new Float32Array(count);
    for (let i = 0; i < count; i++)
      out[i] = kind === "key16" ? view.getUint16(2 * i, true) - 1
        : kind === "half" ? half[view.getUint16(2 * i, true)] : view.getFloat32(4 * i, true);
    return out;
  };
  const all = (value) => value === null || value === undefined ? null
    : Array.isArray(value) && typeof value[0] === "string" && value.length === 3
      && typeof value[1] === "number" ? read(value)
    : Array.isArray(value) ? value.map(all)
    : typeof value === "object"
      ? Object.fromEntries(Object.entries(value).map(([name, v]) => [name, all(v)])) : value;
  return { ...packed, ...all(packed.arrays), arrays: null, blob: null };
};

// ---- sets: the rules of Sec. 5.1 over bits ----------------------------------------------------

// How a head moves sets, as describe() of the view says: for all heads, or for each.
infoflow.move = (input, rule, layer, head) =>
  Array.isArray(input.moves[rule]) ? input.moves[rule][layer][head] : input.moves[rule];

// The keys that a head moves to a query, one call each.
infoflow.eachKey = function (input, rule, k, layer, head, query, visit) {
  const move = infoflow.move(input, rule, layer, head);
  if (move.source === "all") {
    const end = input.causal ? Math.min(query + 1, input.tokens.length) : input.tokens.length;
    for (let key = 0; key < end; key++) visit(key);
    return;
  }
  const listed = move.source === "keys";
  if (!listed && move.source !== "ranked") return;
  const keys = listed ? move.keys : input.ranked[layer];
  const width = listed ? move.width : input.depths[layer];
  const most = Math.min(listed ? width : move.most ?? k, width);
  const row = (listed ? query : head * input.n_queries + query) * width;
  for (let i = 0; i < most; i++) if (keys[row + i] >= 0) visit(keys[row + i]);
};

infoflow.has = (sets, words, position, source) =>
  (sets[position * words + (source >> 5)] >>> (source & 31)) & 1;

// Sets below the first layer and after each, as bits; off[layer] is a Set of heads.
infoflow.propagate = function (input, rule, k, off) {
  const n = input.n_queries, nSource = input.tokens.length, words = Math.ceil(nSource / 32);
  let below = new Uint32Array(n * words);
  for (let s = 0; s < nSource; s++) below[s * words + (s >> 5)] |= 1 << (s & 31);
  const sets = [below];
  input.heads.forEach((nHeads, layer) => {
    const above = below.slice(), from = below;
    let prefix = null;
    for (let head = 0; head < nHeads; head++) {
      if (off[layer].has(head)) continue;
      if (infoflow.move(input, rule, layer, head).source === "all") {
        prefix = prefix || infoflow.prefixes(input, from, words);
        for (let i = 0; i < above.length; i++) above[i] |= prefix[i];
        continue;
      }
      for (let query = 0; query < n; query++)
        infoflow.eachKey(input, rule, k, layer, head, query, (key) => {
          for (let w = 0; w < words; w++) above[query * words + w] |= from[key * words + w];
        });
    }
    sets.push(above);
    below = above;
  });
  return { sets, words };
};

// What a query gets of all keys that it may read.
infoflow.prefixes = function (input, from, words) {
  const n = input.n_queries, last = input.tokens.length - 1, out = new Uint32Array(n * words);
  for (let query = 0; query < n; query++)
    for (let w = 0; w < words; w++)
      out[query * words + w] = query > last ? out[last * words + w]
        : from[query * words + w] | (query ? out[(query - 1) * words + w] : 0);
  if (!input.causal)
    for (let query = 0; query < last; query++)
      for (let w = 0; w < words; w++) out[query * words + w] = out[last * words + w];
  return out;
};

// Edges by which sources reach a state (or, for the row of tokens, by which a token goes up).
infoflow.ways = function (input, rule, k, off, found, selected, source) {
  const { sets, words } = found, n = input.n_queries, edges = [], residual = [];
  const carries = (layer, position) => {
    if (source !== null) return infoflow.has(sets[layer], words, position, source);
    for (let w = 0; w < words; w++) if (sets[layer][position * words + w]) return true;
    return false;
  };
  const upward = selected.layer < 0;
  let alive = new Set(upward ? [] : [selected.position]);
  const top = upward ? input.heads.length - 1 : selected.layer;
  const lit = input.heads.map(() => new Set());
  lit.push(new Set());
  for (let layer = top; layer >= 0; layer--) {
    const next = new Set();
    const queries = upward ? Array.from({ length: n }, (_, t) => t) : alive;
    for (const query of queries) {
      if (upward && !carries(layer + 1, query)) continue;
      lit[layer + 1].add(query);
      if (carries(layer, query)) { residual.push([layer, query, query]); next.add(query); }
      for (let head = 0; head < input.heads[layer]; head++) {
        if (off[layer].has(head)) continue;
        infoflow.eachKey(input, rule, k, layer, head, query, (key) => {
          if (!carries(layer, key)) return;
          next.add(key);
          edges.push([layer, key, query, head]);
        });
      }
    }
    alive = next;
  }
  for (const position of upward ? [selected.position] : alive) lit[0].add(position);
  return { edges, residual, lit };
};

// One way of a source to a state, the highest hop first, by the residual stream where it can.
infoflow.way = function (input, rule, k, off, found, selected, source) {
  const hops = [];
  let position = selected.position;
  for (let layer = selected.layer; layer >= 0; layer--) {
    if (infoflow.has(found.sets[layer], found.words, position, source)) continue;
    let hop = null;
    for (let head = 0; head < input.heads[layer] && !hop; head++)
      if (!off[layer].has(head))
        infoflow.eachKey(input, rule, k, layer, head, position, (key) => {
          if (!hop && infoflow.has(found.sets[layer], found.words, key, source))
            hop = { layer, head, key };
        });
    if (!hop) return null;
    hops.push(hop);
    position = hop.key;
  }
  return hops;
};

// ---- the picture ------------------------------------------------------------------------------

infoflow.Picture = class {
  constructor(root, data, css) {
    this.data = data;
    this.root = root;
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
      input: 0, rule: Object.keys(data.rules)[0], k: data.k, layer: 0, position: 0,
      cursor: null, hover: null, head: null, off: [], clicks: "open",
    };
    this.build();
    this.watchTheme();
    this.ready = this.show(0, data.selected);
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

  build() {
    const { data, state, box } = this;
    if (data.title) box.append("h3").text(data.title);
    else box.attr("aria-label", "information flow");
    const bar = box.append("div").attr("class", "controls");
    if (data.groups.length > 1) {
      this.groupButtons = bar.append("div").attr("class", "choice").attr("role", "group")
        .attr("aria-label", "model").selectAll("button").data(data.groups).join("button")
        .attr("type", "button").text((g) => g.name)
        .on("click", (_, g) => this.show(g.first + (state.input - this.group().first) % g.count));
    }
    if (data.inputs.length > 1) {
      const choice = bar.append("label").text("input ");
      this.inputs = choice.append("select").attr("class", "input")
        .on("change", (event) => this.show(Number(event.target.value)));
    }
    const rule = bar.append("label").attr("class", "rule").text("rule ");
    this.rules = rule.append("select").on("change", (event) => {
      state.rule = event.target.value;
      this.update();
    });
    this.rules.selectAll("option").data(Object.entries(data.rules)).join("option")
      .attr("value", (r) => r[0]).text((r) => r[1]);
    this.k = bar.append("label").attr("class", "k").text("k ");
    this.k.append("input").attr("type", "range").attr("min", 1).on("input", (event) => {
      state.k = Number(event.target.value);
      this.update();
    });
    this.k.append("output");
    this.layer = bar.append("label").attr("class", "layer").text("state after layer ");
    this.layer.append("input").attr("type", "range").attr("min", 0).on("input", (event) => {
      state.layer = Number(event.target.value);
      this.update();
    });
    this.layer.append("output");
    this.status = box.append("p").attr("class", "status").attr("aria-live", "polite");
    this.text = box.append("div").attr("class", "text").attr("role", "group")
      .attr("aria-label", "tokens; press one to choose its state");
    this.legend = box.append("p").attr("class", "legend");
    const columns = box.append("div").attr("class", "columns");
    const main = columns.append("div").attr("class", "main");
    this.figure = this.panel(main, "flow", "Which head passes what to which state");
    this.measured = this.panel(main, "edges", "Measured: which state moves which state above it");
    const side = columns.append("div").attr("class", "side");
    this.buildHeads(side);
    const table = box.append("details").attr("class", "table").attr("open", true);
    table.append("summary").text("This set as a table");
    this.table = table.append("div").attr("class", "scroll").attr("tabindex", 0)
      .attr("role", "region").attr("aria-label", "the set as a table").append("table");
    this.notes = box.append("div").attr("class", "notes");
    this.notes.selectAll("p").data(data.notes).join("p").text((note) => note);
    if (Object.keys(data.record).length) {
      const record = box.append("details");
      record.append("summary").text("Record of the run");
      record.append("pre").text(JSON.stringify(data.record, null, 2));
    }
    this.tip = box.append("div").attr("class", "tip").attr("role", "tooltip").attr("hidden", true);
    let width = 0;
    new ResizeObserver(([entry]) => {
      if (Math.abs(entry.contentRect.width - width) < 4) return;
      width = entry.contentRect.width;
      if (this.input) this.drawFlow();
    }).observe(main.node());
  }

  panel(parent, name, title) {
    const figure = parent.append("figure").attr("class", name);
    figure.append("figcaption").text(title);
    const body = figure.append("div").attr("class", "body");
    const names = body.append("div").attr("class", "names").attr("aria-hidden", "true");
    const heading = body.append("div").attr("class", "heading");
    const scroll = body.append("div").attr("class", "scroll");
    const stage = scroll.append("div").attr("class", "stage").attr("tabindex", 0)
      .attr("role", "application").attr("aria-label",
        "states by layer and position; arrow keys move, Enter chooses, Escape goes back");
    const canvas = stage.append("canvas").attr("aria-hidden", "true");
    const svg = stage.append("svg").attr("aria-hidden", "true");
    const place = (event) => this.placeAt(stage.node(), event);
    stage.on("click", (event) => {
      const at = place(event);
      if (at) this.select(at.layer, at.position);
    }).on("pointermove", (event) => {
      if (event.pointerType === "touch") return;
      const at = place(event);
      this.point(at && { ...at, x: event.clientX, y: event.clientY });
    }).on("pointerleave", () => this.point(null))
      .on("keydown", (event) => this.key(event, stage.node()))
      .on("blur", () => { this.state.cursor = null; this.point(null); this.drawStates(); });
    return { figure, scroll, heading, names, stage, canvas, svg };
  }

  buildHeads(side) {
    const { state } = this;
    const figure = side.append("figure").attr("class", "heads");
    figure.append("figcaption").text("Heads, a row for each layer");
    const clicks = figure.append("div").attr("class", "choice").attr("role", "group")
      .attr("aria-label", "what a press on a head does");
    this.clicks = clicks.selectAll("button")
      .data([["open", "open its pattern"], ["switch", "switch it on or off"]])
      .join("button").attr("type", "button").text((d) => d[1])
      .on("click", (_, d) => { state.clicks = d[0]; this.drawHeads(); });
    this.heads = figure.append("div").attr("class", "scroll").append("div").attr("class", "matrix")
      .attr("role", "group").attr("aria-label",
        "heads; arrow keys move, Enter opens the pattern, Space switches on or off");
    const all = figure.append("div").attr("class", "choice");
    all.append("button").attr("type", "button").attr("class", "all-on").text("all on")
      .on("click", () => { state.off.forEach((heads) => heads.clear()); this.update(); });
    all.append("button").attr("type", "button").attr("class", "all-off").text("all off")
      .on("click", () => {
        state.off = this.input.heads.map((n) => new Set(Array.from({ length: n }, (_, h) => h)));
        this.update();
      });
    this.pattern = side.append("figure").attr("class", "pattern").attr("hidden", true);
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
      state.position = selected ? selected[1] : input.n_queries - 1;
    }
    if (state.head && (state.head[0] >= input.heads.length
      || state.head[1] >= input.heads[state.head[0]])) state.head = null;
    state.cursor = state.hover = null;
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
    this.found = infoflow.propagate(input, rule, state.k, state.off);
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
    this.measure();
    this.draw();
    this.drawTable();
    this.say();
    this.point(state.hover); // what the tip says depends on the chosen state
  }

  // Influence on the chosen state: each source's, and its share of the largest of other tokens.
  measure() {
    const { input, state } = this, n = input.tokens.length;
    this.values = new Float32Array(n).fill(NaN);
    if (input.influence && state.layer >= 0)
      for (let s = 0; s < n; s++) this.values[s] = this.influence(state.layer, state.position, s);
    this.largest = this.largestOther(this.values);
  }

  influence(layer, position, source) {
    const { input } = this, row = layer * input.n_queries + position;
    return input.largest[row] * input.influence[row * input.tokens.length + source];
  }

  largestOther(values) {
    let largest = NaN;
    values.forEach((v, s) => {
      if (s !== this.state.position && !Number.isNaN(v)) largest = Math.max(largest || 0, v);
    });
    return largest;
  }

  share(source) {
    const { values, largest } = this;
    return Number.isNaN(values[source]) ? NaN
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

  select(layer, position) {
    this.state.layer = layer;
    this.state.position = position;
    this.update();
  }

  point(at) {
    const before = this.state.hover, same = before && at && before.layer === at.layer
      && before.position === at.position;
    this.state.hover = at;
    if (!same && (before || at)) {
      this.drawEdges();
      this.mark();
    }
    this.tell(at && { text: this.describe(at.layer, at.position), x: at.x, y: at.y });
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
      state.cursor = null;
      state.head = null;
      this.point(null);
      this.update();
    }
  }

  // ---- geometry

  layOut() {
    const { input } = this;
    const room = this.figure.scroll.node().clientWidth || 600;
    const least = matchMedia("(pointer: coarse)").matches ? 24 : 16;
    const n = input.n_queries, nLayers = input.heads.length;
    const column = Math.max(least, Math.min(72, (room - 2) / n));
    const row = Math.max(28, Math.min(84, 300 / nLayers));
    const strip = Math.max(12, Math.min(26, 150 / nLayers));
    const labels = column >= 46 ? 30 : 74;
    const graph = 18 + row * nLayers;
    this.size = {
      column, row, strip, labels, graph, width: column * n,
      strips: graph + labels + 38, height: graph + labels + 38 + strip * nLayers + 8,
    };
  }

  x(position) { return (position + 0.5) * this.size.column; }
  y(layer) { return 14 + this.size.row * (this.input.heads.length - 1 - layer); }
  stripY(layer) {
    return this.size.strips + this.size.strip * (this.input.heads.length - 1 - layer);
  }

  // The state under a pointer; the strips belong to the chosen position.
  placeAt(node, event) {
    const { input, size, state } = this, box = node.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const position = Math.floor(x / size.column);
    if (position < 0 || position >= input.n_queries) return null;
    if (y >= size.strips) {
      if (event.type === "click" || position >= input.tokens.length) return null;
      const layer = input.heads.length - 1 - Math.floor((y - size.strips) / size.strip);
      return layer >= 0 ? { layer: -1, position, strip: layer } : null;
    }
    const layer = input.heads.length - 1 - Math.round((y - 14) / size.row);
    const within = Math.max(-1, Math.min(input.heads.length - 1, layer));
    if (within < 0 && position >= input.tokens.length) return null;
    return { layer: within, position };
  }

  reveal(position = this.state.position) {
    for (const { scroll } of [this.figure, this.measured]) {
      const node = scroll.node(), x = this.x(position);
      if (x < node.scrollLeft + 30 || x > node.scrollLeft + node.clientWidth - 30)
        node.scrollLeft = x - node.clientWidth / 2;
    }
  }

  // ---- drawing

  draw() {
    this.colours = this.readColours();
    this.drawFlow();
    this.drawHeads();
    this.drawPattern();
  }

  // What depends on the width; the rest stays, as it may be under the pointer.
  drawFlow() {
    this.layOut();
    const { input, size } = this;
    this.measured.figure.attr("hidden", input.edges ? null : true);
    for (const panel of [this.figure, this.measured]) {
      if (panel === this.measured && !input.edges) continue;
      const height = panel === this.figure ? size.height : size.graph + size.labels;
      const scale = Math.min(devicePixelRatio || 1, 16000 / size.width);
      panel.stage.style("width", `${size.width}px`).style("height", `${height}px`);
      panel.canvas.attr("width", Math.round(size.width * scale))
        .attr("height", Math.round(height * scale))
        .style("width", `${size.width}px`).style("height", `${height}px`);
      panel.svg.attr("width", size.width).attr("height", height);
      panel.scale = scale;
      this.drawNames(panel);
      this.drawLabels(panel);
    }
    this.drawStates();
    this.drawEdges();
    this.drawText();
    this.mark();
  }

  readColours() {
    const style = getComputedStyle(this.box.node());
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    const heads = read("heads").split(" ");
    return {
      ink: read("ink"), soft: read("soft"), line: read("line"), accent: read("accent"),
      influence: read("influence"), paper: read("paper"),
      head: (head) => heads[head % heads.length],
    };
  }

  drawNames(panel) {
    const { input, size, state } = this;
    const rows = [{ y: this.y(-1), text: "tokens" }];
    input.heads.forEach((_, layer) => rows.push({
      y: this.y(layer), text: `layer ${layer}`, chosen: layer === state.layer,
    }));
    if (panel === this.figure) {
      if (size.strip >= 12)
        input.heads.forEach((_, layer) => rows.push({
          y: this.stripY(layer) + size.strip / 2, text: `layer ${layer}`,
          chosen: layer === state.layer,
        }));
    }
    panel.names.selectAll("span").data(rows).join("span").text((d) => d.text)
      .classed("chosen", (d) => d.chosen).style("top", (d) => `${d.y}px`);
  }

  drawLabels(panel) {
    const { input, size } = this, upright = size.column >= 46;
    const cut = upright ? Math.floor(size.column / 8) : 10;
    const shorten = (t) => [...t].length > cut ? [...t].slice(0, cut - 1).join("") + "…" : t;
    const places = Array.from({ length: input.n_queries }, (_, t) => t);
    const base = this.y(-1) + 16;
    panel.svg.selectAll("text.label").data(places).join("text").attr("class", "label")
      .attr("text-anchor", upright ? "middle" : "end")
      .attr("transform", (t) => upright ? `translate(${this.x(t)},${base + 8})`
        : `translate(${this.x(t) + 4},${base - 4}) rotate(-90)`)
      .text((t) => shorten(this.token(t)));
    if (panel !== this.figure) return;
    panel.heading.style("top", `${size.strips - 26}px`).text(input.influence
      ? "measured influence on this position, by layer (frame: predicted)"
      : "predicted sets of this position, by layer (influence was not measured)");
  }

  drawStates() {
    const { input, state, size } = this;
    this.path = infoflow.ways(input, this.rule, state.k, state.off, this.found, state,
      state.layer < 0 ? state.position : null);
    const states = [];
    for (let layer = -1; layer < input.heads.length; layer++)
      for (let t = 0; t < (layer < 0 ? input.tokens.length : input.n_queries); t++)
        states.push([layer, t]);
    const marked = new Set(input.marked), upward = state.layer < 0;
    const radius = Math.min(7, size.column * 0.32, size.row * 0.3);
    for (const panel of [this.figure, this.measured]) {
      if (panel === this.measured && !input.edges) continue;
      const mine = panel === this.figure;
      if (!mine) this.edgePath = this.measuredWays();
      const lit = mine ? this.path.lit : this.edgePath.lit;
      panel.svg.selectAll("circle.state").data(states, (d) => d.join())
        .join("circle").attr("class", ([layer, t]) => {
          const on = lit[layer + 1].has(t);
          return "state" + (on ? " lit" : "")
            + (layer < 0 && (mine ? this.inSet(t) && !upward : this.share(t) >= 0.1)
              ? " member" : "")
            + (layer < 0 && marked.has(t) ? " marked" : "")
            + (layer === state.layer && t === state.position ? " selected" : "")
            + (state.cursor && layer === state.cursor.layer && t === state.cursor.position
              ? " cursor" : "");
        })
        .attr("data-layer", (d) => d[0]).attr("data-position", (d) => d[1])
        .attr("cx", (d) => this.x(d[1])).attr("cy", (d) => this.y(d[0])).attr("r", radius);
    }
  }

  // The same for measured edges of at least a tenth of the largest on a state.
  measuredWays() {
    const { input, state } = this, n = input.n_queries;
    const edges = [], residual = [], lit = Array.from({ length: input.heads.length + 1 },
      () => new Set());
    const upward = state.layer < 0;
    const strengths = input.edges.map((values) => {
      const rows = [], width = values.length / n;
      for (let t = 0; t < n; t++) {
        const row = Array.from(values.slice(t * width, (t + 1) * width));
        const largest = Math.max(1e-30, ...row);
        rows.push(row.map((v, s) => [s, v / largest]).filter(([s, v]) => v >= 0.1 && s !== t));
      }
      return rows;
    });
    if (upward) {
      lit[0].add(state.position);
      strengths.forEach((rows, layer) => rows.forEach((row, t) => {
        if (lit[layer].has(t)) { lit[layer + 1].add(t); residual.push([layer, t, t]); }
        for (const [s, v] of row)
          if (lit[layer].has(s)) { lit[layer + 1].add(t); edges.push([layer, s, t, v]); }
      }));
      return { edges, residual, lit };
    }
    lit[state.layer + 1].add(state.position);
    for (let layer = state.layer; layer >= 0; layer--)
      for (const t of lit[layer + 1]) {
        if (layer > 0 || t < input.tokens.length) {
          lit[layer].add(t);
          residual.push([layer, t, t]);
        }
        for (const [s, v] of strengths[layer][t]) {
          if (layer === 0 && s >= input.tokens.length) continue;
          lit[layer].add(s);
          edges.push([layer, s, t, v]);
        }
      }
    return { edges, residual, lit };
  }

  pen(panel) {
    const pen = panel.canvas.node().getContext("2d");
    pen.setTransform(panel.scale, 0, 0, panel.scale, 0, 0);
    return pen;
  }

  drawEdges() {
    const { input, state, colours, path } = this;
    const pen = this.pen(this.figure), { column, width } = this.size;
    pen.clearRect(0, 0, width, this.size.height);
    const link = d3.link(d3.curveBumpY).context(pen).x((p) => p[0]).y((p) => p[1]);
    const line = (layer, key, query, shift) => {
      pen.beginPath();
      link({
        source: [this.x(key) + shift, this.y(layer - 1)],
        target: [this.x(query) + shift, this.y(layer)],
      });
      pen.stroke();
    };
    const dotted = (edges) => {
      pen.setLineDash([2, 4]);
      pen.strokeStyle = colours.soft;
      pen.lineWidth = 1.5;
      for (const [layer, key, query] of edges) line(layer, key, query, 0);
      pen.setLineDash([]);
    };
    // where a token is pointed at, its ways alone are strong
    const hover = state.hover && state.layer >= 0 && state.hover.layer < 0
      && this.inSet(state.hover.position)
      ? infoflow.ways(input, this.rule, state.k, state.off, this.found, state,
        state.hover.position) : null;
    const most = 6000;
    this.left = Math.max(0, path.edges.length - most);
    const drawn = (edges, alpha, wide) => {
      pen.globalAlpha = alpha;
      dotted(edges.residual);
      pen.lineWidth = wide;
      for (const [layer, key, query, head] of edges.edges.slice(0, most)) {
        const n = input.heads[layer];
        pen.strokeStyle = colours.head(head);
        line(layer, key, query, (head - (n - 1) / 2) * Math.min(1.6, column / (2 * n)));
      }
      pen.globalAlpha = 1;
    };
    const crowd = Math.min(path.edges.length, most);
    drawn(path, hover ? 0.08 : Math.max(0.12, Math.min(0.9, 160 / crowd)), crowd > 400 ? 1 : 1.8);
    if (hover) drawn(hover, 1, 2.4);
    this.drawStrips(pen);
    if (!input.edges) return;
    const second = this.pen(this.measured);
    second.clearRect(0, 0, width, this.size.height);
    link.context(second);
    second.strokeStyle = colours.soft;
    second.setLineDash([2, 4]);
    const curve = (layer, key, query) => {
      second.beginPath();
      link({ source: [this.x(key), this.y(layer - 1)], target: [this.x(query), this.y(layer)] });
      second.stroke();
    };
    for (const [layer, key, query] of this.edgePath.residual) curve(layer, key, query);
    second.setLineDash([]);
    second.strokeStyle = colours.ink;
    second.lineWidth = 2;
    for (const [layer, key, query, strength] of this.edgePath.edges) {
      second.globalAlpha = Math.max(0.15, strength);
      curve(layer, key, query);
    }
    second.globalAlpha = 1;
  }

  drawStrips(pen) {
    const { input, size, state, colours, found } = this, own = state.position;
    const n = input.tokens.length;
    input.heads.forEach((_, layer) => {
      const y = this.stripY(layer), height = size.strip - 2;
      let largest = NaN;
      const values = Array.from({ length: n }, (_, s) =>
        input.influence ? this.influence(layer, own, s) : NaN);
      values.forEach((v, s) => {
        if (s !== own && !Number.isNaN(v)) largest = Math.max(largest || 0, v);
      });
      for (let s = 0; s < n; s++) {
        const x = s * size.column + 1, width = size.column - 2;
        if (Number.isNaN(values[s])) this.hatch(pen, x, y, width, height);
        else if (s === own) {
          pen.strokeStyle = colours.soft;
          pen.lineWidth = 1;
          pen.beginPath();
          pen.moveTo(x + 2, y + height / 2);
          pen.lineTo(x + width - 2, y + height / 2);
          pen.stroke();
        } else {
          pen.fillStyle = `rgba(${colours.influence},${largest > 0 ? values[s] / largest : 0})`;
          pen.fillRect(x, y, width, height);
        }
        const member = infoflow.has(found.sets[layer + 1], found.words, own, s);
        pen.lineWidth = member ? 2 : 0.5;
        pen.strokeStyle = member ? colours.accent : colours.line;
        pen.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
      }
      if (layer === state.layer) {
        pen.strokeStyle = colours.ink;
        pen.lineWidth = 1;
        pen.strokeRect(0.5, y - 1, n * size.column - 1, height + 2);
      }
    });
  }

  hatch(pen, x, y, width, height) {
    pen.save();
    pen.beginPath();
    pen.rect(x, y, width, height);
    pen.clip();
    pen.strokeStyle = this.colours.line;
    pen.lineWidth = 1;
    for (let at = -height; at < width; at += 5) {
      pen.beginPath();
      pen.moveTo(x + at, y + height);
      pen.lineTo(x + at + height, y);
      pen.stroke();
    }
    pen.restore();
  }

  drawText() {
    const { input, state } = this, marked = new Set(input.marked);
    const places = Array.from({ length: input.n_queries }, (_, t) => t);
    this.text.selectAll("span").data(places).join("span")
      .attr("class", (t) => {
        const source = t < input.tokens.length;
        return "token" + (source && this.inSet(t) ? " in" : "")
          + (t === state.position ? " own" : "") + (marked.has(t) ? " marked" : "")
          + (source && Number.isNaN(this.values[t]) ? " unmeasured" : "");
      })
      .attr("role", "button").attr("tabindex", -1).attr("dir", "auto")
      .attr("data-position", (t) => t)
      .attr("aria-label", (t) => this.describe(-1, t))
      .style("background-color", (t) => {
        const share = t < input.tokens.length && t !== state.position ? this.share(t) : 0;
        return share > 0 ? `rgba(${this.colours.influence},${share})` : null;
      })
      .text((t) => this.token(t))
      .on("click", (_, t) => this.select(Math.max(state.layer, 0), t))
      .on("pointermove", (event, t) => event.pointerType !== "touch"
        && this.point({ layer: -1, position: t, x: event.clientX, y: event.clientY }))
      .on("pointerleave", () => this.point(null));
    const parts = [["frame", "in the predicted set"]];
    if (input.influence && state.layer >= 0 && !Number.isNaN(this.largest)) {
      parts.unshift(["shade", "measured influence, as a share of the largest of other tokens"]);
    }
    if (this.values.some((v) => Number.isNaN(v))) parts.push(["hatched", "not measured"]);
    parts.push(["line", "its own token, which the residual stream keeps (outside the scale)"]);
    if (marked.size) parts.push(["ring", this.data.marked_name || "marked"]);
    this.legend.selectAll("span.item").data(parts, (d) => d[0]).join((enter) => {
      const item = enter.append("span").attr("class", "item");
      item.append("span").attr("class", (d) => `key ${d[0]}`);
      item.append("span").text((d) => d[1]);
      return item;
    }).order();
  }

  drawHeads() {
    const { input, state, colours } = this;
    this.clicks.attr("aria-pressed", (d) => String(d[0] === state.clicks));
    const used = new Set(this.path.edges.map((e) => `${e[0]}.${e[3]}`));
    const layers = input.heads.map((n, layer) => ({ n, layer })).reverse();
    const rows = this.heads.selectAll("div.row").data(layers, (d) => d.layer)
      .join((enter) => {
        const row = enter.append("div").attr("class", "row");
        row.append("span").attr("class", "name");
        return row;
      }).order();
    rows.select(".name").text((d) => d.layer);
    const focus = state.head ? state.head.join(".") : `${input.heads.length - 1}.0`;
    rows.selectAll("button").data((d) => Array.from({ length: d.n }, (_, h) => [d.layer, h]))
      .join("button").attr("type", "button").attr("class", "head")
      .classed("off", ([l, h]) => state.off[l].has(h))
      .classed("used", (d) => used.has(d.join(".")))
      .classed("open", (d) => state.head && state.head.join(".") === d.join("."))
      .attr("data-head", (d) => d.join("."))
      .attr("aria-pressed", ([l, h]) => String(!state.off[l].has(h)))
      .attr("aria-label", (d) => this.headName(d))
      .attr("title", (d) => this.headName(d))
      .attr("tabindex", (d) => d.join(".") === focus ? 0 : -1)
      .style("background-color", ([l, h]) => state.off[l].has(h) ? null : colours.head(h))
      .text((d) => d[1])
      .on("click", (_, d) => state.clicks === "open" ? this.open(d) : this.turn(d))
      .on("keydown", (event, d) => this.headKey(event, d));
  }

  headName([layer, head]) {
    const { input, state } = this;
    const mechanism = input.mechanisms ? `, ${input.mechanisms[layer][head].replace(/_/g, " ")}`
      : "";
    return `layer ${layer}, head ${head}${mechanism}, ${state.off[layer].has(head) ? "off" : "on"}`;
  }

  headKey(event, [layer, head]) {
    const { input } = this;
    const moves = {
      ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0],
    };
    if (moves[event.key]) {
      event.preventDefault();
      const l = Math.max(0, Math.min(input.heads.length - 1, layer + moves[event.key][0]));
      const h = Math.max(0, Math.min(input.heads[l] - 1, head + moves[event.key][1]));
      const next = this.heads.select(`[data-head="${l}.${h}"]`);
      this.heads.selectAll("button").attr("tabindex", -1);
      next.attr("tabindex", 0).node().focus();
    } else if (event.key === " ") {
      event.preventDefault();
      this.turn([layer, head]);
    } else if (event.key === "Enter") {
      event.preventDefault();
      this.open([layer, head]);
    } else if (event.key === "Escape") {
      this.state.head = null;
      this.draw();
    }
  }

  turn([layer, head]) {
    const off = this.state.off[layer];
    if (!off.delete(head)) off.add(head);
    this.update();
  }

  open(head) {
    this.state.head = head;
    this.drawHeads();
    this.drawPattern();
  }

  drawPattern() {
    const { input, state, colours } = this, figure = this.pattern;
    figure.attr("hidden", state.head ? null : true);
    figure.selectAll("*").remove();
    if (!state.head) return;
    const [layer, head] = state.head, n = input.n_queries;
    const pattern = input.patterns && input.patterns[layer];
    const width = pattern ? pattern.length / (input.heads[layer] * n) : n;
    figure.append("figcaption").text(`Pattern of ${this.headName(state.head)}`);
    const on = figure.append("label");
    on.append("input").attr("type", "checkbox").property("checked", !state.off[layer].has(head))
      .on("change", () => this.turn(state.head));
    on.append("span").text(" this head passes on what it reads");
    const weight = new Float32Array(n * width).fill(NaN);
    if (pattern) weight.set(pattern.subarray(head * n * width, (head + 1) * n * width));
    const depth = input.depths[layer], ranked = input.ranked[layer];
    const weights = input.weights && input.weights[layer];
    const scores = input.scores && input.scores[layer];
    const extra = new Map();
    for (let query = 0; query < n; query++)
      for (let r = 0; r < depth; r++) {
        const at = (head * n + query) * depth + r, key = ranked[at];
        if (key < 0) continue;
        if (weights) weight[query * width + key] = weights[at];
        extra.set(query * width + key, [r + 1, scores ? scores[at] : NaN]);
      }
    const cell = Math.max(1, Math.min(16, Math.floor(320 / Math.max(n, width))));
    const canvas = figure.append("div").attr("class", "scroll").append("canvas")
      .attr("width", width * cell).attr("height", n * cell)
      .attr("role", "img").attr("aria-label", "attention pattern: queries down, keys across");
    const pen = canvas.node().getContext("2d");
    for (let query = 0; query < n; query++)
      for (let key = 0; key < width; key++) {
        const value = weight[query * width + key];
        const rank = extra.get(query * width + key);
        if (!Number.isNaN(value)) pen.fillStyle = `rgba(${colours.influence},${Math.min(1, value)})`;
        else if (rank) pen.fillStyle = `rgba(${colours.influence},${1 / rank[0]})`;
        else pen.fillStyle = input.causal && key > query ? "transparent" : colours.line;
        pen.fillRect(key * cell, query * cell, cell - (cell > 3 ? 1 : 0), cell - (cell > 3 ? 1 : 0));
      }
    pen.strokeStyle = colours.accent;
    pen.strokeRect(0.5, state.position * cell + 0.5, width * cell - 1, Math.max(1, cell - 1));
    const locate = (event) => {
      const box = canvas.node().getBoundingClientRect();
      return [Math.floor((event.clientY - box.top) / box.height * n),
        Math.floor((event.clientX - box.left) / box.width * width)];
    };
    canvas.on("pointermove", (event) => {
      const [query, key] = locate(event);
      if (query < 0 || query >= n || key < 0 || key >= width) return;
      const value = weight[query * width + key], rank = extra.get(query * width + key);
      const lines = [`query ${query} “${this.token(query)}”`, `key ${key} “${this.token(key)}”`];
      lines.push(!Number.isNaN(value) ? `weight ${infoflow.number(value)}`
        : input.causal && key > query ? "later than the query: not read" : "weight was not kept");
      if (rank) lines.push(`rank ${rank[0]}` + (Number.isNaN(rank[1]) ? ""
        : `, score ${infoflow.number(rank[1])}`));
      this.tell({ text: lines, x: event.clientX, y: event.clientY });
    }).on("pointerleave", () => this.tell(null))
      .on("click", (event) => this.select(layer, Math.max(0, Math.min(n - 1, locate(event)[0]))));
    figure.append("p").text("Queries go down, keys across; shade is weight, 0 to 1. A press on a "
      + "row chooses its state."
      + (pattern ? "" : weights ? " Of each query the largest weights were kept; what is grey was "
        + "not, and need not be zero."
        : " Weights were not kept: shade is rank, the first key strongest.")
      + this.readBy(layer, head));
  }

  readBy(layer, head) {
    const keys = [];
    infoflow.eachKey(this.input, this.rule, this.state.k, layer, head, this.state.position,
      (key) => keys.push(`${key} “${this.token(key)}”`));
    const shown = keys.slice(0, 8).join(", ") + (keys.length > 8 ? `, … (${keys.length} keys)` : "");
    return ` At position ${this.state.position} it passes on ${shown || "nothing"}.`;
  }

  drawTable() {
    const { input, state } = this;
    const upward = state.layer < 0;
    this.table.selectAll("*").remove();
    this.table.append("caption").text(upward
      ? `States that hold ${this.stateName(-1, state.position)}`
      : `What ${this.stateName(state.layer, state.position)} can hold`);
    const heads = upward ? ["layer", "positions"]
      : ["position", "token", "in the predicted set", "measured influence", "share of the largest",
        "one way it came"];
    this.table.append("thead").append("tr").selectAll("th").data(heads).join("th")
      .attr("scope", "col").text((d) => d);
    const body = this.table.append("tbody");
    const rows = [];
    if (upward)
      input.heads.forEach((_, layer) => rows.push([layer,
        [...this.path.lit[layer + 1]].sort((a, b) => a - b)
          .map((t) => `${t} “${this.token(t)}”`).join(", ")]));
    else
      input.tokens.forEach((token, s) => {
        const inside = this.inSet(s), own = s === state.position, share = this.share(s);
        if (!inside && !own && !(share >= 0.1)) return;
        const missing = Number.isNaN(this.values[s]);
        rows.push([s, token, own && inside ? "own token" : inside ? "yes" : "no",
          missing ? "not measured" : infoflow.number(this.values[s]),
          missing || own ? "–" : infoflow.percent(share), inside ? this.wayOf(s) : "–"]);
      });
    body.selectAll("tr").data(rows).join("tr").selectAll("td").data((d) => d).join("td")
      .attr("dir", "auto").text((d) => d);
    if (!rows.length) body.append("tr").append("td").attr("colspan", heads.length)
      .text("The set is empty.");
  }

  wayOf(source) {
    const { input, state } = this;
    const hops = infoflow.way(input, this.rule, state.k, state.off, this.found, state, source);
    if (!hops) return "–";
    if (!hops.length) return "residual stream";
    return hops.reverse().map((h) => `layer ${h.layer} head ${h.head} from ${h.key}`).join(", then ");
  }

  // The sentence above the picture, which screen readers say when it changes.
  say() {
    const { input, state } = this;
    if (state.layer < 0) {
      const above = this.path.lit.slice(1).map((s, l) => `${s.size} in layer ${l}`).join(", ");
      this.status.text(`States that can hold ${this.stateName(-1, state.position)}: ${above}.`);
      return;
    }
    const members = input.tokens.map((_, s) => s).filter((s) => this.inSet(s));
    const others = members.filter((s) => s !== state.position);
    const possible = (input.causal ? Math.min(state.position, input.tokens.length)
      : input.tokens.length - (state.position < input.tokens.length ? 1 : 0));
    const name = this.stateName(state.layer, state.position);
    let text = `${name[0].toUpperCase()}${name.slice(1)} can hold `
      + (others.length ? `${others.length} of ${possible} other tokens` : "no other token")
      + (members.length > others.length ? " and its own." : ".");
    if (input.influence) {
      let inside = 0, all = 0; // as Python's Explained: without the own token, not squared
      this.values.forEach((v, s) => {
        if (s === state.position || Number.isNaN(v)) return;
        all += v;
        if (this.inSet(s)) inside += v;
      });
      const full = others.length === possible && possible > 0;
      text += full
        ? " That is every token that it could hold, so the prediction excludes nothing." : "";
      if (Number.isNaN(this.largest)) text += " Influence on it was not measured.";
      else if (!(all > 0)) text += " No other token has any measured influence on it.";
      else if (others.length && !full)
        text += ` ${infoflow.percent(inside / all)} of the measured influence of `
          + `other tokens lies inside; as many tokens at random: `
          + `${infoflow.percent(others.length / possible)}.`;
    } else text += " Influence was not measured.";
    if (this.left) text += ` ${this.left} of ${this.path.edges.length} edges are not drawn.`;
    this.status.text(text);
  }

  // ---- pointing

  describe(layer, position) {
    const { input, state } = this, name = `position ${position} “${this.token(position)}”`;
    if (layer < 0) {
      if (position >= input.tokens.length) return [`${name}: no token of its own`];
      const lines = [name];
      if (state.layer < 0) return lines;
      lines.push(position === state.position ? "own token: kept by the residual stream"
        : this.inSet(position) ? "in the predicted set" : "not in the predicted set");
      const value = this.values[position];
      lines.push(Number.isNaN(value) ? "influence not measured"
        : `influence ${infoflow.number(value)}` + (position === state.position ? ""
          : `, ${infoflow.percent(this.share(position))} of the largest of others`));
      if (this.inSet(position) && position !== state.position) lines.push(this.wayOf(position));
      return lines;
    }
    let size = 0;
    for (let s = 0; s < input.tokens.length; s++)
      size += infoflow.has(this.found.sets[layer + 1], this.found.words, position, s);
    const lines = [`after layer ${layer}, ${name}: ${size} tokens in its set`];
    const depth = input.depths[layer];
    for (let head = 0; head < Math.min(8, input.heads[layer]); head++) {
      const at = (head * input.n_queries + position) * depth;
      const key = depth ? input.ranked[layer][at] : -1;
      if (key < 0) { lines.push(`head ${head}: reads no key`); continue; }
      const known = input.weights && !Number.isNaN(input.weights[layer][at]);
      lines.push(`head ${head} reads ${key} “${this.token(key)}” most`
        + (known ? `, weight ${infoflow.number(input.weights[layer][at])}` : "")
        + (input.scores ? `, score ${infoflow.number(input.scores[layer][at])}` : "")
        + (state.off[layer].has(head) ? " (off)" : ""));
    }
    if (input.heads[layer] > 8) lines.push(`and ${input.heads[layer] - 8} other heads`);
    return lines;
  }

  mark() {
    const at = this.state.hover;
    const under = (t) => Boolean(at && at.layer < 0 && at.position === t);
    this.text.selectAll("span.token").classed("under", under);
    this.figure.svg.selectAll("text.label").classed("under", under);
  }

  tell(what) {
    const tip = this.tip;
    tip.attr("hidden", what ? null : true);
    if (!what) return;
    tip.selectAll("div").data([].concat(what.text)).join("div").attr("dir", "auto").text((d) => d);
    const box = tip.node().getBoundingClientRect();
    const x = Math.min(what.x + 14, innerWidth - box.width - 8);
    const y = what.y + 18 + box.height > innerHeight ? what.y - box.height - 12 : what.y + 18;
    tip.style("left", `${Math.max(4, x)}px`).style("top", `${Math.max(4, y)}px`);
  }
};

infoflow.mount = function (id, css) {
  for (const root of document.querySelectorAll(`[data-infoflow="${id}"]`)) {
    if (root.shadowRoot) continue;
    const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
    const picture = new infoflow.Picture(root, data, css);
    (window.infoflowPictures = window.infoflowPictures || []).push(picture);
    picture.ready.catch((error) => {
      picture.status.text(`This picture cannot be shown: ${error.message}`);
    });
  }
};
