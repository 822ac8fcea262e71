// The text, and what its signs and those of the figures mean.
Object.assign(infoflow.Picture.prototype, {
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
      .each((t, i, nodes) => {
        const source = t < input.tokens.length, own = t === state.position, node = nodes[i];
        const share = source && !own ? this.share(t) : 0;
        const looks = [
          this.token(t),
          this.describe(-1, t, true).join(", "),
          "token" + (source && this.inSet(t) ? " in" : "") + (own ? " own" : "")
            + (marked.has(t) ? " marked" : "")
            + (source && Number.isNaN(this.values[t]) ? " unmeasured" : ""),
          state.layer < 0 || own ? "" : `${Math.round(15 + 85 * this.level(paths.best[0][t]))}%`,
          share > 0 ? `rgba(${this.colours.influence},${share})` : "",
        ];
        const before = node.looks || [], now = (which) => looks[which] !== before[which];
        // most tokens stay as they are
        if (now(0)) node.textContent = looks[0];
        if (now(1)) node.setAttribute("aria-label", looks[1]);
        if (now(2)) node.setAttribute("class", looks[2]);
        if (now(3)) node.style.setProperty("--strength", looks[3]);
        if (now(4)) node.style.backgroundColor = looks[4];
        node.looks = looks;
      });
    this.drawLegends();
  },

  drawLegends() {
    const { input, state } = this, number = infoflow.number;
    const parts = [["frame", "in the predicted set; the fuller the frame, the stronger its best path"]];
    if (input.influence && state.layer >= 0 && this.largest > 0)
      parts.unshift(["shade", "share of the measured influence of all other tokens, from none to "
        + `${infoflow.percent(this.largest / this.total)} or more, here and in the strips below`]);
    if (this.values.some((v) => Number.isNaN(v))) parts.push(["hatched", "not measured"]);
    parts.push(["line", "its own token, which the residual stream keeps (outside the scale)"]);
    if (this.places.all.size) parts.push(["find", "found"]);
    if (input.marked.length) parts.push(["ring", this.data.marked_name || "marked"]);
    this.drawKeys(this.legend, parts);
    this.drawKeys(this.figure.legend, [
      ["thick", `strength ${number(this.strongest || 0)}`],
      ["thin", "next to none; the strength of a path is the product of its attention weights"],
      ["many", "number and colour: the head, as in the list of heads"],
      ["dotted", "residual stream"],
      ["filled", "token in the set, the fuller the stronger its best path"],
      ["black", "the chosen state"],
      ["ringed", "state on a line that is drawn"],
      ["grey", "on other lines alone"],
      ["pale", "on none"],
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
    }).order().each((d, i, nodes) => infoflow.write(d3.select(nodes[i].lastChild), () => d[1]));
  },
});
