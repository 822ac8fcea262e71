// The lattice of states with its lines, the strips below it, and the text.
const MOST_CIRCLES = 1000; // of states, each an element of the page [chosen]

Object.assign(infoflow.Picture.prototype, {
  layOut() {
    const { input } = this;
    this.room = this.room || this.figure.scroll.node().clientWidth || 600;
    const { room } = this; // read anew where the width changes alone
    const least = matchMedia("(pointer: coarse)").matches ? 24 : 11;
    const n = input.n_queries, nLayers = input.heads.length;
    const column = Math.max(least, Math.min(72, (room - 2) / n));
    const row = Math.max(34, Math.min(84, 300 / nLayers));
    const strip = Math.max(14, Math.min(26, 150 / nLayers));
    const labels = column >= 46 ? 30 : 74;
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
    this.sayView(panel);
  },

  panels() { return this.input.edges ? [this.figure, this.measured] : [this.figure]; },

  // Which columns are seen, where some are not.
  sayView({ scroll, view }) {
    const node = scroll.node(), { column } = this.size, n = this.input.n_queries;
    const first = Math.ceil(node.scrollLeft / column - 0.5);
    const last = Math.floor((node.scrollLeft + node.clientWidth) / column - 0.5);
    const all = node.scrollWidth <= node.clientWidth + 2;
    view.attr("hidden", all ? true : null).text(`Positions ${Math.max(0, first)} to `
      + `${Math.min(n - 1, last)} of 0 to ${n - 1} are in view; scroll sideways for the others.`);
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

  // The circles of a panel; of very many states those alone that stand out, as others are drawn
  // on the canvas.
  placeStates(panel, states = this.states(panel)) {
    const { size } = this;
    panel.circles = [];
    panel.states.selectAll("circle").data(states).join("circle")
      .attr("data-layer", (d) => d[0]).attr("data-position", (d) => d[1])
      .attr("cx", (d) => this.x(d[1])).attr("cy", (d) => this.y(d[0])).attr("r", size.radius)
      .attr("class", "state").style("fill-opacity", null)
      .each(function keep([layer, t]) {
        panel.circles.push({ layer, t, node: this, looks: "state", full: "" });
      });
  },

  states(panel, quiet = false) {
    const { input } = this, many = this.many(), states = [];
    for (let layer = -1; layer < input.heads.length; layer++)
      for (let t = 0; t < (layer < 0 ? input.tokens.length : input.n_queries); t++)
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
    for (const [layer, t] of this.states(panel, true)) {
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

  // How strong something is drawn: its strength over that of the strongest line.
  level(strength) {
    return strength > 0 && this.strongest > 0 ? Math.min(1, strength / this.strongest) : 0;
  },

  curve({ layer, key, query, head }) {
    const n = this.input.heads[layer], link = d3.link(d3.curveBumpY);
    const shift = (head - (n - 1) / 2) * Math.min(1.6, this.size.column / (2 * n));
    return link({
      source: [this.x(key) + shift, this.y(layer - 1)],
      target: [this.x(query) + shift, this.y(layer)],
    });
  },

  // The lines of the strongest paths; where a token is pointed at, its best path stands out.
  drawLines() {
    const { state, paths, drawn } = this;
    const at = state.hover && state.hover.layer < 0 && state.layer >= 0
      && this.inSet(state.hover.position) ? state.hover.position : null;
    const best = at === null ? [] : infoflow.bestPath(paths, 0, at) || [];
    const strong = new Set(best), shown = drawn.concat(best.filter((i) => !this.isDrawn.has(i)));
    const carries = (line) => infoflow.has(this.found.sets[line.layer], this.found.words, line.key, at);
    const lines = shown.map((i) => ({ ...paths.lines.at(i), strong: strong.has(i) }));
    const name = this.lineName;
    const focused = lines.some((d) => name(d) === this.focused) ? this.focused : lines.length
      && name(lines[0]);
    this.figure.lines.selectAll("g.line").data(lines, name).join((enter) => {
      const line = enter.append("g").attr("class", "line").attr("role", "button")
        .attr("data-line", name)
        .on("pointermove", (event) => {
          if (event.pointerType === "touch") return;
          event.stopPropagation();
          this.pointLine(this.nearestLine(event), event.clientX, event.clientY);
        })
        .on("pointerleave", () => this.markLine(null))
        .on("click", (event) => { event.stopPropagation(); this.pin(this.nearestLine(event)); })
        .on("focus", (event, d) => {
          const box = event.currentTarget.getBoundingClientRect();
          this.focused = this.lineName(d);
          this.pointLine(d, box.left + box.width / 2, box.top + box.height / 2);
        })
        .on("blur", () => this.point(null))
        .on("keydown", (event, d) => this.lineKey(event, d));
      line.append("path").attr("class", "hit");
      line.append("path").attr("class", "ink");
      return line;
    }).attr("tabindex", (d) => name(d) === focused ? 0 : -1)
      .attr("aria-label", (d) => this.describeLine(d).join(", "))
      .classed("strong", (d) => d.strong)
      .classed("weak", (d) => at !== null && !d.strong && carries(d))
      .classed("faded", (d) => at !== null && !d.strong && !carries(d))
      .classed("pinned", (d) => state.line && name(state.line) === name(d))
      .each((d, i, nodes) => {
        const [hit, ink] = nodes[i].children, level = this.level(d.strength), path = this.curve(d);
        hit.setAttribute("d", path);
        ink.setAttribute("d", path);
        ink.style.stroke = this.headColour(d.layer, d.head);
        ink.style.strokeWidth = 0.7 + 3.6 * level;
        ink.style.strokeOpacity = 0.3 + 0.7 * level;
      }).order();
    this.drawResidual(at);
    this.drawNumbers(lines, (d) => at !== null && !d.strong && !carries(d));
  },

  // The residual stream where drawn paths run along it, and where the best path of a token does.
  drawResidual(at) {
    const parts = [this.residual, new Set()];
    if (at !== null)
      infoflow.follow(this.paths, 0, at, (level, line, position) => {
        if (line < 0) parts[1].add(`${level},${position}`);
      });
    this.figure.residual.selectAll("path").data(parts).join("path")
      .classed("strong", (_, i) => i === 1).classed("faded", (_, i) => i === 0 && at !== null)
      .attr("d", (where) => [...where].map((each) => {
        const [level, position] = each.split(",").map(Number);
        return `M${this.x(position)},${this.y(level - 1)}V${this.y(level)}`;
      }).join(""));
  },

  // The numbers of heads on their lines, the strongest first, where there is room.
  drawNumbers(lines, faded) {
    const taken = [], numbers = [];
    for (const d of lines) {
      const x = (this.x(d.key) + this.x(d.query)) / 2, y = (this.y(d.layer - 1) + this.y(d.layer)) / 2;
      if (taken.some((other) => Math.abs(other[0] - x) < 15 && Math.abs(other[1] - y) < 12)) continue;
      taken.push([x, y]);
      numbers.push({ ...d, x, y });
    }
    this.figure.numbers.selectAll("text").data(numbers).join("text").attr("class", "number").classed("faded", faded)
      .attr("x", (d) => d.x).attr("y", (d) => d.y + 3.5).attr("text-anchor", "middle")
      .style("fill", (d) => this.headColour(d.layer, d.head)).text((d) => d.head);
  },

  pen(panel) {
    const pen = panel.canvas.node().getContext("2d");
    pen.setTransform(panel.scale, 0, 0, panel.scale, 0, 0);
    pen.clearRect(0, 0, this.size.width, this.size.height);
    return pen;
  },

  // The same for measured edges of at least a tenth of the largest on a state.
  measuredPaths() {
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
  },

  drawMeasured() {
    const { colours } = this, pen = this.pen(this.measured);
    this.drawQuiet(this.measured, pen);
    const link = d3.link(d3.curveBumpY).context(pen);
    const curve = (layer, key, query) => {
      pen.beginPath();
      link({ source: [this.x(key), this.y(layer - 1)], target: [this.x(query), this.y(layer)] });
      pen.stroke();
    };
    pen.strokeStyle = colours.soft;
    pen.setLineDash([2, 4]);
    for (const [layer, key, query] of this.edgePaths.residual) curve(layer, key, query);
    pen.setLineDash([]);
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 2;
    for (const [layer, key, query, strength] of this.edgePaths.edges) {
      pen.globalAlpha = Math.max(0.15, strength);
      curve(layer, key, query);
    }
    pen.globalAlpha = 1;
  },

  drawStrips() {
    const { input, size, state, colours } = this, own = state.position;
    const n = input.tokens.length, pen = this.pen(this.figure), hatching = this.hatching(pen);
    this.drawQuiet(this.figure, pen);
    input.heads.forEach((_, layer) => {
      const y = this.stripY(layer), height = size.strip - 2;
      const values = Array.from({ length: n }, (_, s) =>
        input.influence ? this.influence(layer, own, s) : NaN);
      const largest = this.largestOther(values);
      for (let s = 0; s < n; s++) {
        const x = s * size.column + 1, width = size.column - 2;
        if (Number.isNaN(values[s])) {
          pen.fillStyle = hatching;
          pen.fillRect(x, y, width, height);
        } else if (s === own) {
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
        const member = infoflow.has(this.found.sets[layer + 1], this.found.words, own, s);
        pen.globalAlpha = member && layer === state.layer && s !== own
          ? 0.15 + 0.85 * this.level(this.paths.best[0][s]) : layer === state.layer ? 1 : 0.45;
        pen.lineWidth = member ? (layer === state.layer ? 2.4 : 1) : 0.5;
        pen.strokeStyle = member ? colours.accent : colours.line;
        pen.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
        pen.globalAlpha = 1;
      }
      if (layer === state.layer) {
        pen.strokeStyle = colours.ink;
        pen.lineWidth = 1;
        pen.strokeRect(0.5, y - 1, n * size.column - 1, height + 2);
      }
    });
  },

  // Hatched areas, for what was not measured.
  hatching(pen) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 5;
    const lines = tile.getContext("2d");
    lines.strokeStyle = this.colours.line;
    for (const from of [-5, 0, 5]) {
      lines.moveTo(from, 5);
      lines.lineTo(from + 5, 0);
    }
    lines.stroke();
    return pen.createPattern(tile, "repeat");
  },

  drawText() {
    const { input, state, paths } = this, marked = new Set(input.marked);
    const places = Array.from({ length: input.n_queries }, (_, t) => t);
    this.text.selectAll("span").data(places).join((enter) => enter.append("span")
      .attr("role", "button").attr("tabindex", -1).attr("dir", "auto")
      .attr("data-position", (t) => t)
      .on("click", (_, t) => this.select(Math.max(state.layer, 0), t))
      .on("pointermove", (event, t) => event.pointerType !== "touch"
        && this.point({ layer: -1, position: t, x: event.clientX, y: event.clientY }))
      .on("pointerleave", () => this.point(null)))
      .attr("class", (t) => {
        const source = t < input.tokens.length;
        return "token" + (source && this.inSet(t) ? " in" : "")
          + (t === state.position ? " own" : "") + (marked.has(t) ? " marked" : "")
          + (source && Number.isNaN(this.values[t]) ? " unmeasured" : "");
      })
      .attr("aria-label", (t) => this.describe(-1, t).slice(0, 3).join(", "))
      .style("--strength", (t) => state.layer < 0 || t === state.position ? null
        : `${Math.round(15 + 85 * this.level(paths.best[0][t]))}%`)
      .style("background-color", (t) => {
        const share = t < input.tokens.length && t !== state.position ? this.share(t) : 0;
        return share > 0 ? `rgba(${this.colours.influence},${share})` : null;
      })
      .filter((t, i, nodes) => nodes[i].textContent !== this.token(t))
      .text((t) => this.token(t));
    this.drawLegends();
  },

  drawLegends() {
    const { input, state } = this, number = infoflow.number;
    const parts = [["frame", "in the predicted set; the fuller the frame, the stronger its best path"]];
    if (input.influence && state.layer >= 0 && this.largest > 0)
      parts.unshift(["shade", "measured influence, from none to "
        + `${infoflow.percent(this.largest / this.total)} of that of all other tokens`]);
    if (this.values.some((v) => Number.isNaN(v))) parts.push(["hatched", "not measured"]);
    parts.push(["line", "its own token, which the residual stream keeps (outside the scale)"]);
    if (input.marked.length) parts.push(["ring", this.data.marked_name || "marked"]);
    this.drawKeys(this.legend, parts);
    this.drawKeys(this.figure.legend, [
      ["thick", `strength ${number(this.strongest || 0)}`],
      ["thin", "next to none; the strength of a path is the product of its attention weights"],
      ["many", "number and colour: the head, as in the list of heads"],
      ["dotted", "residual stream"],
      ["filled", "token in the set"],
      ["black", "the chosen state"],
    ]);
    this.drawKeys(this.measured.legend, [
      ["thick ink", "measured influence of one state on another, the darker the larger"],
      ["dotted", "residual stream"],
    ]);
  },

  drawKeys(legend, parts) {
    legend.selectAll("span.item").data(parts, (d) => d[0]).join((enter) => {
      const item = enter.append("span").attr("class", "item");
      item.append("span").attr("class", (d) => `key ${d[0]}`);
      item.append("span").attr("class", "meaning");
      return item;
    }).order().select(".meaning").text((d) => d[1]);
  },
});
