// The lattice of states: its places, its panels, its names.
const BESIDE = 30; // columns that are drawn to either side of those in view [chosen]
const MOST_CIRCLES = 1000; // of states, each an element of the page [chosen]

Object.assign(infoflow.Picture.prototype, {
  layOut() {
    const { input } = this, n = input.n_queries, nLayers = input.heads.length;
    const touch = matchMedia("(pointer: coarse)").matches;
    if (this.laidOut !== n) this.room = null;
    if (!this.room) { // read anew where the width or the input changes alone
      this.laidOut = n;
      const wide = this.columns.node().clientWidth;
      this.columns.classed("stacked", wide < 820 || n * 11 > wide - 444);
      this.room = this.figure.scroll.node().clientWidth || 600;
    }
    const fits = (this.room - 2) / n;
    const column = Math.max(touch ? 24 : fits >= 8 ? 8 : 11, Math.min(72, fits));
    const row = Math.max(34, Math.min(84, 300 / nLayers));
    const strip = Math.max(14, Math.min(26, 150 / nLayers));
    const longest = Math.min(10, Math.max(...Array.from({ length: n }, (_, t) => this.token(t).length)));
    const labels = column >= 46 ? 30 : 10 + 7 * longest;
    const graph = 18 + row * nLayers;
    this.size = {
      radius: Math.min(7, column * 0.32, row * 0.3), column, row, strip, labels, graph, width: column * n,
      strips: graph + labels + 38, height: graph + labels + 38 + strip * nLayers + 8,
    };
  },

  x(position) { return (position + 0.5) * this.size.column; },
  y(layer) { return 14 + this.size.row * (this.input.heads.length - 1 - layer); },
  stripY(layer) {
    return this.size.strips + this.size.strip * (this.input.heads.length - 1 - layer);
  },

  // The state under a pointer; the strips belong to the chosen position.
  placeAt(node, event) {
    const { input, size } = this, box = node.getBoundingClientRect();
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
  },

  reveal(position = this.state.position) {
    for (const { scroll } of [this.figure, this.measured]) {
      const node = scroll.node(), x = this.x(position);
      if (x < node.scrollLeft + 30 || x > node.scrollLeft + node.clientWidth - 30)
        node.scrollLeft = x - node.clientWidth / 2;
    }
  },

  draw() {
    this.colours = this.readColours();
    this.drawFlow();
    this.drawHeads();
    this.drawPattern();
    this.drawWhy();
  },

  // What depends on the width; the rest stays, as it may be under the pointer.
  drawFlow() {
    this.layOut();
    const { input, size, state } = this;
    this.measured.figure.attr("hidden", input.edges ? null : true);
    const shape = [state.input, size.column, size.row, devicePixelRatio].join();
    const again = shape !== this.shape;
    this.shape = shape;
    for (const panel of this.panels()) {
      if (again) this.drawStage(panel);
      this.drawNames(panel);
    }
    this.drawStates();
    this.drawLines();
    this.drawStrips();
    if (input.edges) this.drawMeasured();
    this.drawText();
    this.mark();
  },

  // What depends on nothing but the width and the input.
  drawStage(panel) {
    const { size } = this;
    const height = panel === this.figure ? size.height : size.graph + size.labels;
    const scale = Math.min(devicePixelRatio || 1, 16000 / size.width);
    panel.stage.style("width", `${size.width}px`).style("height", `${height}px`);
    panel.canvas.attr("width", Math.round(size.width * scale))
      .attr("height", Math.round(height * scale))
      .style("width", `${size.width}px`).style("height", `${height}px`);
    panel.svg.attr("width", size.width).attr("height", height);
    panel.scale = scale;
    this.drawLabels(panel);
    panel.circles = null;
    panel.states.selectAll("circle").remove();
    this.sayView(panel);
  },

  panels() { return this.input.edges ? [this.figure, this.measured] : [this.figure]; },

  // Which columns are seen, where some are not.
  sayView({ scroll, view }) {
    const node = scroll.node(), { column } = this.size, n = this.input.n_queries;
    const first = Math.ceil(node.scrollLeft / column - 0.5);
    const last = Math.floor((node.scrollLeft + node.clientWidth) / column - 0.5);
    view.attr("hidden", first <= 0 && last >= n - 1 ? true : null)
      .text(`Positions ${Math.max(0, first)} to ${Math.min(n - 1, last)} of 0 to ${n - 1} are in view; `
        + "scroll sideways for the others.");
  },

  readColours() {
    const style = getComputedStyle(this.box.node());
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    const heads = read("heads").split(" "), light = read("paper") === "#fff";
    return {
      ink: read("ink"), soft: read("soft"), line: read("line"), accent: read("accent"),
      influence: read("influence"), paper: read("paper"),
      // no two heads of a layer share a colour
      head: (head, n) => n <= heads.length ? heads[head]
        : `hsl(${Math.round(360 * head / n)} ${head % 2 ? 75 : 50}% ${(light ? 36 : 60) + 8 * (head % 3)}%)`,
    };
  },

  headColour(layer, head) { return this.colours.head(head, this.input.heads[layer]); },

  drawNames(panel) {
    const { input, size, state } = this;
    const rows = [{ y: this.y(-1), text: "tokens" }];
    input.heads.forEach((_, layer) => rows.push({
      y: this.y(layer), text: `layer ${layer}`, chosen: layer === state.layer,
    }));
    if (panel === this.figure)
      input.heads.forEach((_, layer) => rows.push({
        y: this.stripY(layer) + size.strip / 2 - 1, text: `layer ${layer}`,
        chosen: layer === state.layer,
      }));
    panel.names.selectAll("span").data(rows).join("span").text((d) => d.text)
      .classed("chosen", (d) => d.chosen).style("top", (d) => `${d.y}px`);
  },

  drawLabels(panel) {
    const { input, size } = this, upright = size.column >= 46;
    const cut = upright ? Math.floor(size.column / 8) : 10;
    const shorten = (t) => [...t].length > cut ? [...t].slice(0, cut - 1).join("") + "…" : t;
    const places = Array.from({ length: input.n_queries }, (_, t) => t);
    const base = this.y(-1) + 16;
    panel.labels.selectAll("text.label").data(places).join("text").attr("class", "label")
      .classed("small", size.column < 14)
      .attr("text-anchor", upright ? "middle" : "end")
      .attr("transform", (t) => upright ? `translate(${this.x(t)},${base + 8})`
        : `translate(${this.x(t) + 4},${base - 4}) rotate(-90)`)
      .text((t) => shorten(this.token(t)));
    if (panel !== this.figure) return;
    panel.heading.style("top", `${size.strips - 26}px`).text(input.influence
      ? "measured influence, by layer (frame: predicted)"
      : "predicted sets, by layer (not measured)");
  },

  // The columns in view and some beside them, which are all that a canvas draws.
  seen({ left = 0 }) {
    const { column } = this.size, n = this.input.n_queries;
    const first = Math.floor(left / column), last = Math.ceil((left + this.room) / column);
    return [Math.max(0, first - BESIDE), Math.min(n, last + BESIDE), first, last];
  },

  // After a scroll, what was not drawn.
  drawSeen(panel) {
    panel.left = panel.scroll.node().scrollLeft; // read here alone, as it costs a layout
    this.sayView(panel);
    const [from, to] = panel.drawn, [, , first, last] = this.seen(panel);
    if (first >= from && Math.min(last, this.input.n_queries) <= to) return;
    if (panel === this.figure) this.drawStrips();
    else this.drawMeasured();
  },

  // The circles of a panel; of very many states those alone that stand out, as others are drawn
  // on the canvas.
  placeStates(panel, states = this.states(panel)) {
    const { size } = this;
    const before = new Map((panel.circles || []).map((each) => [each.node, each]));
    panel.circles = [];
    panel.states.selectAll("circle").data(states, (d) => d.join()).join((enter) =>
      enter.append("circle").attr("class", "state").attr("data-layer", (d) => d[0])
        .attr("data-position", (d) => d[1]).attr("cx", (d) => this.x(d[1]))
        .attr("cy", (d) => this.y(d[0])).attr("r", size.radius))
      .each(function keep([layer, t]) {
        panel.circles.push(before.get(this) || { layer, t, node: this, looks: "state", full: "" });
      });
  },

  states(panel, quiet = false, from = 0, to = this.input.n_queries) {
    const { input } = this, many = this.many(), states = [];
    for (let layer = -1; layer < input.heads.length; layer++)
      for (let t = from; t < Math.min(to, layer < 0 ? input.tokens.length : input.n_queries); t++)
        if ((!many || this.standsOut(panel, layer, t)) !== quiet) states.push([layer, t]);
    return states;
  },

  many() { return this.input.n_queries * (this.input.heads.length + 1) > MOST_CIRCLES; },

  standsOut(panel, layer, t) {
    const { state } = this, { cursor } = state;
    return layer < 0 || (layer === state.layer && t === state.position)
      || Boolean(cursor && layer === cursor.layer && t === cursor.position)
      || (panel === this.figure ? this.onPath[layer + 1][t] > 0
        : this.edgePaths.lit[layer + 1].has(t));
  },

  drawQuiet(panel, pen) {
    if (!this.many()) return;
    pen.beginPath();
    const [from, to] = panel.drawn;
    for (const [layer, t] of this.states(panel, true, from, to)) {
      pen.moveTo(this.x(t) + this.size.radius, this.y(layer));
      pen.arc(this.x(t), this.y(layer), this.size.radius, 0, 2 * Math.PI);
    }
    pen.lineWidth = 1;
    pen.strokeStyle = this.colours.line;
    pen.stroke();
  },

  drawStates() {
    const { input, state, paths } = this, marked = new Set(input.marked), { cursor } = state;
    if (input.edges) this.edgePaths = this.measuredPaths();
    for (const panel of this.panels()) {
      const mine = panel === this.figure;
      if (this.many() || !panel.circles) this.placeStates(panel);
      for (const circle of panel.circles) {
        const { layer, t, node } = circle, token = layer < 0;
        const lit = mine ? paths.best[layer + 1][t] >= 0 : this.edgePaths.lit[layer + 1].has(t);
        const path = mine ? this.onPath[layer + 1][t] > 0 : lit;
        const member = token && state.layer >= 0 && (mine ? this.inSet(t) : this.share(t) >= 0.1);
        const looks = "state" + (lit ? " lit" : "") + (path ? " path" : "")
          + (member ? " member" : "") + (token && marked.has(t) ? " marked" : "")
          + (layer === state.layer && t === state.position ? " selected" : "")
          + (cursor && layer === cursor.layer && t === cursor.position ? " cursor" : "");
        const full = member && mine && t !== state.position
          ? (0.15 + 0.85 * this.level(paths.best[0][t])).toFixed(2) : "";
        // most circles stay as they are
        if (looks !== circle.looks) node.setAttribute("class", looks);
        if (full !== circle.full) node.style.fillOpacity = full;
        Object.assign(circle, { looks, full });
      }
    }
  },

  pen(panel) {
    const pen = panel.canvas.node().getContext("2d");
    pen.setTransform(panel.scale, 0, 0, panel.scale, 0, 0);
    pen.clearRect(0, 0, this.size.width, this.size.height);
    panel.drawn = this.seen(panel);
    return pen;
  },
});
