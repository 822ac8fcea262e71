// The search for tokens: what matches is marked, and Enter goes from one to the next.
Object.assign(infoflow.Picture.prototype, {
  buildSearch(bar) {
    const label = bar.append("label").attr("class", "search").text("find ");
    this.search = label.append("input").attr("type", "search").attr("maxlength", 100)
      .attr("placeholder", "token").attr("title", "/ comes here, Enter goes to the next, Shift Enter "
        + "to the one before, Escape ends")
      .on("input", (event) => this.find(event.target.value))
      .on("keydown", (event) => {
        if (event.key === "Enter") {
          event.preventDefault();
          this.goTo(event.shiftKey ? -1 : 1);
        } else if (event.key === "Escape") {
          this.search.property("value", "");
          this.find("");
        }
        event.stopPropagation();
      });
    this.matches = label.append("output").attr("aria-live", "polite");
    const focus = (event) => {
      const typing = event.composedPath()[0];
      if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented
        || /^(INPUT|TEXTAREA|SELECT)$/.test(typing.tagName) || typing.isContentEditable) return;
      event.preventDefault();
      this.search.node().focus();
    };
    // a notebook has a use of its own for the key
    (this.alone && this.number === 0 ? document : this.box.node()).addEventListener("keydown", focus);
  },

  // Where a text occurs, also over several tokens: the first of each place, and all of them.
  occurrences(text) {
    const first = [], all = new Set(), wanted = text.toLowerCase();
    if (!wanted) return { first, all };
    const starts = [];
    let whole = "";
    for (let t = 0; t < this.input.tokens.length; t++) {
      starts.push(whole.length);
      whole += this.token(t).toLowerCase();
    }
    const holder = (at) => starts.findLastIndex((start) => start <= at);
    for (let at = whole.indexOf(wanted); at >= 0; at = whole.indexOf(wanted, at + 1)) {
      const from = holder(at), to = holder(at + wanted.length - 1);
      if (first[first.length - 1] !== from) first.push(from);
      for (let t = from; t <= to; t++) all.add(t);
    }
    return { first, all };
  },

  find(text) {
    this.state.find = text;
    this.places = this.occurrences(text);
    this.mark();
    this.drawLegends();
    this.countMatches();
    if (this.changed) this.changed();
  },

  countMatches() {
    const { first } = this.places, at = first.indexOf(this.state.position) + 1;
    this.matches.text(!this.state.find ? "" : !first.length ? "not there"
      : at ? `${at} of ${first.length}` : `${first.length} found`);
    this.keep();
  },

  goTo(step) {
    const { first } = this.places, { state } = this;
    if (!first.length) return;
    const after = step > 0 ? first.find((t) => t > state.position)
      : first.findLast((t) => t < state.position);
    const next = after ?? first.at(step > 0 ? 0 : -1);
    this.select(Math.max(state.layer, 0), next);
    this.reveal(next);
    this.text.selectAll("span").nodes()[next].scrollIntoView({ block: "nearest" });
    this.countMatches();
  },
});
