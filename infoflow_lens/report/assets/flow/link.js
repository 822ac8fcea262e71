// The link that keeps the view: what is chosen, in the fragment of the page's address. What a fragment
// says is checked against the picture before it is used, and is never more than numbers and the text
// that is searched for.
infoflow.writeView = function (number, state) {
  const { input, rule, k, layer, position, most, head, line, off, swap, find } = state;
  const switched = off.flatMap((heads, at) => [...heads].sort((a, b) => a - b).map((h) => `${at}.${h}`));
  const said = {
    picture: number, input, rule, k, layer, position, lines: most, head: head && head.join("."),
    why: line && [line.layer, line.head, line.key, line.query].join("."), off: switched.join("-"),
    replace: swap, find,
  };
  return new URLSearchParams(Object.entries(said)
    .filter(([, value]) => value !== null && value !== undefined && value !== "")).toString();
};

// What a fragment says of a picture, as parts that may be missing; null where it is of another one.
infoflow.readView = function (fragment, number) {
  const said = new URLSearchParams(fragment.replace(/^#/, ""));
  if (said.get("picture") !== String(number)) return null;
  const whole = (text) => /^-?\d{1,6}$/.test(text ?? "") ? Number(text) : null;
  const places = (text, n) => {
    const found = (text || "").split(".").map(whole);
    return found.length === n && !found.includes(null) ? found : null;
  };
  return {
    ...Object.fromEntries(["input", "k", "layer", "position", "lines", "replace"]
      .map((name) => [name, whole(said.get(name))])),
    rule: said.get("rule"), find: (said.get("find") || "").slice(0, 100),
    head: places(said.get("head"), 2), why: places(said.get("why"), 4),
    off: (said.get("off") || "").split("-").map((each) => places(each, 2)).filter((each) => each),
  };
};

Object.assign(infoflow.Picture.prototype, {
  buildLink(bar) {
    const link = bar.append("button").attr("type", "button").attr("class", "link").text("copy link")
      .attr("title", "the address of this page with what is chosen now");
    link.attr("hidden", this.alone ? null : true).on("click", async () => {
      this.keepNow();
      try {
        await navigator.clipboard.writeText(location.href);
        link.text("copied");
      } catch { // no right to the clipboard: the address line has it
        link.text("copy it from the address line");
      }
      setTimeout(() => link.text("copy link"), 2500);
    });
    if (this.alone) addEventListener("hashchange", () => this.restore());
  },

  // Browsers allow few changes of the address in a second.
  keep() {
    if (!this.alone || !this.settled) return;
    clearTimeout(this.keeping);
    this.keeping = setTimeout(() => this.keepNow(), 300);
  },

  keepNow() {
    clearTimeout(this.keeping);
    this.kept = `#${infoflow.writeView(this.number, this.state)}`;
    try { history.replaceState(null, "", this.kept); } catch { /* a page in a frame of another */ }
  },

  // Chooses what the fragment says, as far as the picture has it.
  async restore() {
    const said = this.alone && location.hash !== this.kept
      ? infoflow.readView(location.hash, this.number) : null;
    if (!said) return;
    const { data, state } = this, within = (x, low, high) => x !== null && x >= low && x <= high;
    if (within(said.input, 0, data.inputs.length - 1)) await this.show(said.input);
    const { input } = this, hasHead = ([layer, head]) => within(layer, 0, input.heads.length - 1)
      && within(head, 0, input.heads[layer] - 1);
    if (Object.hasOwn(data.rules, said.rule ?? "")) state.rule = said.rule;
    if (within(said.k, 1, Math.max(...input.depths))) state.k = said.k;
    const last = said.layer === -1 ? input.tokens.length - 1 : input.n_queries - 1;
    if (within(said.layer, -1, input.heads.length - 1) && within(said.position, 0, last))
      Object.assign(state, { layer: said.layer, position: said.position });
    state.most = within(said.lines, 1, MOST_EVER) ? said.lines : null;
    state.head = said.head && hasHead(said.head) ? said.head : null;
    const [layer, head, key, query] = said.why || [];
    state.line = said.why && hasHead([layer, head]) && within(key, 0, input.tokens.length - 1)
      && within(query, 0, input.n_queries - 1) ? { layer, head, key, query } : null;
    state.off = input.heads.map(() => new Set());
    for (const each of said.off) if (hasHead(each)) state.off[each[0]].add(each[1]);
    state.swap = within(said.replace, 0, input.tokens.length - 1) ? said.replace : null;
    this.search.property("value", said.find);
    state.find = said.find;
    this.places = this.occurrences(said.find);
    this.update();
    this.countMatches();
    this.reveal();
  },
});
