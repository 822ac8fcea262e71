// What was measured: the strips below the lattice, and edges between states.
Object.assign(infoflow.Picture.prototype, {
  drawStrips(pen = this.pen(this.figure)) {
    const { input, size, state, colours } = this, own = state.position;
    const n = input.tokens.length, hatching = this.hatching(pen);
    this.drawQuiet(this.figure, pen);
    const rows = input.heads.map((_, layer) => this.shares(layer));
    const most = this.total > 0 ? this.largest / this.total // the scale of the text's shade
      : Math.max(...rows.flatMap((row) => Array.from(row, (v, s) => s === own ? 0 : v || 0)));
    input.heads.forEach((_, layer) => {
      const y = this.stripY(layer), height = size.strip - 2, values = rows[layer];
      for (let s = this.figure.drawn[0]; s < Math.min(n, this.figure.drawn[1]); s++) {
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
          pen.fillStyle = `rgba(${colours.influence},${most > 0 ? Math.min(1, values[s] / most) : 0})`;
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

  // Of the influence of other tokens on the chosen position's state after a layer, each one's.
  shares(layer) {
    const { input, state } = this, n = input.tokens.length;
    const values = Float64Array.from({ length: n }, (_, s) =>
      input.influence ? this.influence(layer, state.position, s) : NaN);
    let total = 0;
    values.forEach((v, s) => { if (this.counts(s) && v > 0) total += v; });
    return values.map((v, s) => this.leftOut.has(s) ? NaN : total > 0 ? v / total : v);
  },

  // Hatched areas, for what was not measured.
  hatching(pen) {
    if (!pen.createPattern) return "url(#hatched)"; // in a file
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

  drawMeasured(pen = this.pen(this.measured)) {
    const { colours } = this;
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
});
