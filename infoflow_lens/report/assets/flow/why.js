// Lines as something to point at, and the panel that says why a head reads what it reads.
Object.assign(infoflow.Picture.prototype, {
  lineName({ layer, head, key, query }) { return `${layer}.${head}.${key}.${query}`; },

  // Of the lines under the pointer the one whose middle is nearest.
  nearestLine({ clientX: x, clientY: y }) {
    const found = { distance: Infinity, node: null };
    for (const node of this.root.shadowRoot.elementsFromPoint(x, y)) {
      if (!node.classList.contains("hit")) continue;
      const all = node.getTotalLength(), from = node.getScreenCTM();
      for (let step = 0; step <= 100; step++) {
        const at = node.getPointAtLength(all * step / 100).matrixTransform(from);
        const distance = Math.hypot(at.x - x, at.y - y);
        if (distance < found.distance) Object.assign(found, { distance, node });
      }
    }
    return d3.select(found.node.parentNode).datum();
  },

  markLine(line) {
    this.figure.lines.selectAll("g.line")
      .classed("under", (d) => line && this.lineName(d) === this.lineName(line));
  },

  pointLine(line, x, y) {
    if (this.state.hover) this.point(null);
    this.markLine(line);
    this.tell({ text: [...this.describeLine(line), "a press says why"], x, y });
  },

  // The panel stays until Escape, or until another line is pressed.
  pin({ layer, head, key, query }) {
    this.state.line = { layer, head, key, query };
    this.tell(null);
    this.drawLines();
    this.drawWhy();
    this.keep();
    this.why.node().scrollIntoView({ block: "nearest" });
  },

  unpin() {
    this.state.line = null;
    this.drawLines();
    this.drawWhy();
    this.keep();
  },

  lineKey(event, line) {
    const nodes = this.figure.lines.selectAll("g.line").nodes();
    const at = nodes.indexOf(event.currentTarget);
    const moves = {
      ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity,
    };
    event.stopPropagation();
    if (moves[event.key]) {
      event.preventDefault();
      const next = nodes[Math.max(0, Math.min(nodes.length - 1, at + moves[event.key]))];
      for (const node of nodes) node.tabIndex = node === next ? 0 : -1;
      next.focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.pin(line);
    } else if (event.key === "Escape") {
      this.unpin();
      this.tell(null);
    }
  },

  drawWhy() {
    const { input, state, why } = this;
    why.attr("hidden", state.line ? null : true);
    why.selectAll("*").remove();
    if (!state.line) return;
    const { layer, head, key, query } = state.line;
    const quoted = (position) => `“${this.token(position)}” (${position})`;
    this.drawReasons(state.line, quoted);
    const keys = [], depth = input.depths[layer], row = (head * input.n_queries + query) * depth;
    for (let r = 0; r < depth; r++) {
      const found = input.ranked[layer][row + r];
      if (found >= 0) keys.push([quoted(found), input.weights ? input.weights[layer][row + r] : NaN,
        found === key]);
    }
    if (keys.some((each) => !Number.isNaN(each[1])))
      this.drawBars(why, "Its largest weights"
        + (this.leftOut.size ? " on keys that are not left out" : ""), keys.filter((each) => !Number.isNaN(each[1])));
    why.append("button").attr("type", "button").text("close (Escape)")
      .on("click", () => this.unpin());
  },

  // Why the head prefers its first key to its second: what parts of the keys' states add.
  drawReasons({ layer, head, key, query }, quoted) {
    const { input, why } = this, { reasons } = input;
    const at = head * input.n_queries + query, two = reasons ? reasons.keys[layer].subarray(2 * at) : [];
    const looks = `Head ${layer}.${head} at ${quoted(query)} looks at `;
    if (!reasons || two[1] < 0) {
      why.append("figcaption").text(looks + quoted(key));
      why.append("p").text(reasons ? "It sees no other key." : "Why is not known; see the notes below.");
      return;
    }
    why.append("figcaption").text(`${looks}${quoted(two[0])} rather than at ${quoted(two[1])}`);
    if (key !== two[0]) why.append("p").text(`${quoted(key)} comes later in its order.`);
    const most = reasons.parts[layer].length / (input.heads[layer] * input.n_queries);
    const rows = [];
    for (let i = at * most; i < (at + 1) * most; i++)
      if (reasons.parts[layer][i] >= 0)
        rows.push([reasons.names[reasons.parts[layer][i]], reasons.values[layer][i]]);
    rows.push(["all other parts", reasons.rest[layer][at]]);
    this.drawBars(why, `Its score is larger by ${infoflow.number(reasons.margins[layer][at])}. What `
      + "parts of the keys' states add to that, as they stand; grey takes from it:", rows, true);
  },

  // A list of bars, to the left of their axis where they are negative.
  drawBars(parent, title, rows, signed = false) {
    const largest = Math.max(1e-30, ...rows.map((row) => Math.abs(row[1])));
    parent.append("p").text(title);
    const list = parent.append("ul").attr("class", signed ? "bars signed" : "bars");
    const items = list.selectAll("li").data(rows).join("li").classed("chosen", (d) => d[2]);
    items.append("span").attr("class", "what").attr("dir", "auto").text((d) => d[0]);
    items.append("span").attr("class", (d) => `extent ${d[1] < 0 ? "against" : "for"}`)
      .append("span").style("width", (d) => `${100 * Math.abs(d[1]) / largest}%`);
    items.append("span").attr("class", "much").text((d) => (signed && d[1] > 0 ? "+" : "") + infoflow.number(d[1]));
  },
});
