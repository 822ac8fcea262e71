// The lines of the strongest paths, with the numbers of their heads, and the residual stream.
Object.assign(infoflow.Picture.prototype, {
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
});
