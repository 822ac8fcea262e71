// The matrix of heads and the pattern of one.
Object.assign(infoflow.Picture.prototype, {
  drawHeads() {
    const { input, state } = this;
    this.clicks.attr("aria-pressed", (d) => String(d[0] === state.clicks));
    const used = this.usedHeads;
    const layers = input.heads.map((n, layer) => ({ n, layer })).reverse();
    const rows = this.heads.selectAll("div.row").data(layers, (d) => d.layer)
      .join((enter) => {
        const row = enter.append("div").attr("class", "row");
        row.append("span").attr("class", "name");
        return row;
      }).order();
    this.heads.classed("many", Math.max(...input.heads) > 13);
    rows.select(".name").text((d) => d.layer);
    const focus = state.head ? state.head.join(".") : `${input.heads.length - 1}.0`;
    const buttons = rows.selectAll("button").data((d) => Array.from({ length: d.n },
      (_, h) => [d.layer, h])).join((enter) => enter.append("button").attr("type", "button")
      .attr("class", "head")
      .on("click", (_, d) => state.clicks === "open" ? this.open(d) : this.turn(d))
      .on("keydown", (event, d) => this.headKey(event, d)));
    const looks = ([l, h]) => [l, h, focus === `${l}.${h}`, state.off[l].has(h), used[l][h] > 0,
      Boolean(state.head) && state.head.join(".") === `${l}.${h}`, this.headColour(l, h),
      this.headName([l, h])].join();
    buttons.filter((d, i, nodes) => nodes[i].looks !== looks(d)) // most stay as they are
      .property("looks", looks)
      .classed("off", ([l, h]) => state.off[l].has(h))
      .classed("used", ([l, h]) => used[l][h] > 0)
      .classed("open", (d) => state.head && state.head.join(".") === d.join("."))
      .attr("data-head", (d) => d.join("."))
      .attr("aria-pressed", ([l, h]) => String(!state.off[l].has(h)))
      .attr("aria-label", (d) => this.headName(d))
      .attr("title", (d) => this.headName(d))
      .attr("tabindex", (d) => d.join(".") === focus ? 0 : -1)
      .style("background-color", ([l, h]) => state.off[l].has(h) ? null : this.headColour(l, h))
      .text((d) => d[1]);
  },

  headName([layer, head]) {
    const { input, state } = this;
    const mechanism = input.mechanisms ? `, ${input.mechanisms[layer][head].replace(/_/g, " ")}`
      : "";
    return `layer ${layer}, head ${head}${mechanism}, ${state.off[layer].has(head) ? "off" : "on"}`;
  },

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
      this.heads.selectAll("button").attr("tabindex", -1).property("looks", null);
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
  },

  turn([layer, head]) {
    const off = this.state.off[layer];
    if (!off.delete(head)) off.add(head);
    this.update();
  },

  open(head) {
    this.state.head = head;
    this.drawHeads();
    this.drawPattern();
    this.keep();
  },

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
  },

  readBy(layer, head) {
    const keys = [];
    infoflow.eachKey(this.input, this.rule, this.state.k, layer, head, this.state.position,
      (key) => keys.push(`${key} “${this.token(key)}”`));
    const shown = keys.slice(0, 8).join(", ") + (keys.length > 8 ? `, … (${keys.length} keys)` : "");
    return ` At position ${this.state.position} it passes on ${shown || "nothing"}.`;
  }

});
