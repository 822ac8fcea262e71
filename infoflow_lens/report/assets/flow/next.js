// What the model says next: at the chosen position, and there with another token replaced.
Object.assign(infoflow.Picture.prototype, {
  buildNext(box) {
    this.next = box.append("div").attr("class", "next").attr("role", "group")
      .attr("aria-label", "next tokens");
    this.says = this.next.append("p").attr("class", "as-is");
    this.instead = this.next.append("p").attr("class", "instead").attr("aria-live", "polite");
    for (const line of [this.says, this.instead]) line.append("span").attr("class", "lead");
    const choice = this.next.append("label").attr("class", "swap").text("replace a token ");
    this.swaps = choice.append("select").on("change", (event) => {
      this.state.swap = event.target.value === "" ? null : Number(event.target.value);
      this.drawNext();
      this.keep();
      if (this.changed) this.changed();
    });
  },

  // The position whose next tokens are shown: where a token is chosen, that of the state before it.
  asked() { return this.state.layer >= 0 ? this.state.position : this.state.query; },

  // The most probable next tokens at a position, as pairs of token and probability; with a token
  // replaced, where that is asked. Positions before it say what they did.
  nextAt(position, swap = null) {
    const { input } = this, { replaced } = input;
    if (!input.next || !(position < input.next.length)) return [];
    if (swap === null || position < swap) return input.next[position];
    const rows = swap * input.n_queries - swap * (swap - 1) / 2 + position - swap;
    return Array.from({ length: replaced.width }, (_, i) => rows * replaced.width + i)
      .map((at) => [replaced.words[replaced.tokens[at]], replaced.chances[at]]);
  },

  drawNext() {
    const { input, state } = this, position = this.asked(), found = this.nextAt(position);
    this.next.attr("hidden", found.length ? null : true);
    if (!found.length) return;
    const { replaced } = input, swap = replaced ? state.swap : null;
    this.drawSays(this.says, `Most probable next tokens after position ${position}: `, found);
    this.instead.attr("hidden", swap === null ? true : null);
    if (swap !== null)
      this.drawSays(this.instead, `with token ${swap} “${this.token(swap)}” replaced by `
        + `“${replaced.by[swap]}”${swap > position ? ", which comes later" : ""}: `,
      this.nextAt(position, swap));
    this.next.select(".swap").attr("hidden", replaced ? null : true);
    if (replaced)
      this.swaps.selectAll("option").data([null, ...input.tokens.keys()]).join("option")
        .attr("value", (s) => s ?? "").property("selected", (s) => s === swap)
        .text((s) => s === null ? "none" : `${s} “${this.token(s)}” by “${replaced.by[s]}”`);
  },

  drawSays(line, lead, found) {
    line.select(".lead").text(lead);
    line.selectAll("span.says").data(found).join((enter) => {
      const one = enter.append("span").attr("class", "says");
      one.append("span").attr("class", "word").attr("dir", "auto");
      one.append("span").attr("class", "chance");
      return one;
    }).each((d, i, nodes) => {
      nodes[i].firstChild.textContent = d[0];
      nodes[i].lastChild.textContent = infoflow.percent(d[1]);
    });
  },
});
