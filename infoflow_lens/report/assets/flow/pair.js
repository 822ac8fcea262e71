// Two pictures side by side, of two inputs or of two models: what is chosen in one is chosen in the
// other where their positions align, and a table says what changed.
infoflow.Pair = class {
  constructor(root, data, css, number) {
    Object.assign(this, { root, data, css, following: false });
    const shadow = root.attachShadow({ mode: "open" }), sheet = new CSSStyleSheet();
    sheet.replaceSync(css);
    shadow.adoptedStyleSheets = [sheet];
    const box = this.box = d3.select(shadow.appendChild(document.createElement("div")))
      .attr("class", "picture pair").attr("role", "group").attr("aria-label", data.title);
    box.append("h3").text(data.title);
    const bar = box.append("div");
    const changed = box.append("details").attr("class", "changed").attr("open", true);
    changed.append("summary").text("What changed");
    this.caption = changed.append("p").attr("class", "caption");
    this.table = changed.append("div").attr("class", "wide-table").attr("tabindex", 0)
      .attr("role", "region").attr("aria-label", "what changed").append("table");
    const beside = box.append("div").attr("class", "beside");
    this.maps = [new Map(data.aligned), new Map(data.aligned.map(([a, b]) => [b, a]))];
    this.pictures = data.inputs.map((input, side) => this.make(beside, input, side, number));
    const [one, other] = this.pictures;
    bar.node().append(one.bar.node());
    other.bar.remove();
    this.ready = Promise.all(this.pictures.map((each) => each.ready)).then(() => {
      this.pictures.forEach((picture, side) => {
        picture.changed = () => this.follow(side);
        picture.pointed = (at) => this.pointBoth(side, at);
      });
      this.follow(0);
    });
  }

  make(beside, input, side, number) {
    const { data } = this, own = {
      ...data, inputs: [input], first: 0, groups: [], title: data.groups[side].name, aligned: null,
      notes: side ? [] : data.notes, record: side ? {} : data.record,
      selected: side ? null : data.selected, // the other one follows, or opens on its last state
    };
    const picture = new infoflow.Picture(
      beside.append("div").attr("class", "one").node(), own, this.css, number, side === 0);
    picture.beside = () => this.pictures;
    picture.box.select("details.table").attr("open", null);
    return picture;
  }

  // The same choices in the other picture, as far as it has them.
  follow(side) {
    if (this.following) return;
    const from = this.pictures[side], to = this.pictures[1 - side], map = this.maps[side];
    const { rule, k, most, find, layer, position, query, swap, head } = from.state;
    const same = from.input.heads.join() === to.input.heads.join();
    Object.assign(to.state, { rule, k, most, find });
    if (layer < 0 ? map.has(position) && map.get(position) < to.input.tokens.length : map.has(position))
      Object.assign(to.state, {
        layer: Math.min(layer, to.input.heads.length - 1), position: map.get(position),
        query: map.get(query) ?? to.state.query,
      });
    to.state.swap = swap === null ? null : map.get(swap) ?? null;
    if (same) {
      to.state.off = from.state.off.map((heads) => new Set(heads));
      to.state.head = head;
    }
    to.places = to.occurrences(find);
    this.following = true;
    to.update();
    this.following = false;
    to.reveal();
    this.say();
  }

  pointBoth(side, at) {
    const place = at && this.maps[side].get(at.position), to = this.pictures[1 - side];
    const there = place !== undefined && place !== null && at.layer < to.input.heads.length
      && (at.layer >= 0 || place < to.input.tokens.length);
    to.pointQuietly(there ? { layer: at.layer, position: place } : null);
  }

  say() {
    const { pictures, data } = this, [one, other] = pictures, map = this.maps[0];
    const n = pictures.map((picture) => picture.input.n_queries);
    const linked = map.get(one.state.position) === other.state.position;
    this.caption.text(`${data.aligned.length} positions are matched (of ${n[0]} and ${n[1]}). `
      + (linked ? "" : "The chosen ones are not matched with each other. ")
      + `Chosen: ${pictures.map((each) => each.stateName(each.state.layer, each.state.position))
        .join("; ")}.`);
    const rows = one.state.layer < 0 || other.state.layer < 0 ? [] : [
      this.sizes(), this.inside(), this.alone(), ...this.shifts(), ...this.choices(),
    ];
    rows.push(this.nextTokens());
    this.table.selectAll("*").remove();
    this.table.append("thead").append("tr").selectAll("th")
      .data(["", ...pictures.map((_, side) => data.groups[side].name)]).join("th")
      .attr("scope", "col").text((d) => d);
    this.table.append("tbody").selectAll("tr").data(rows.filter((row) => row)).join("tr")
      .selectAll("td").data((row) => row).join("td").attr("dir", "auto").text((d) => d);
  }

  both(what, give) { return [what, ...this.pictures.map((picture, side) => give(picture, side))]; }

  members(picture) {
    return [...picture.input.tokens.keys()]
      .filter((s) => picture.counts(s) && picture.inSet(s));
  }

  sizes() { return this.both("other tokens in the set", (each) => this.members(each).length); }

  inside() {
    return this.both("share of the measured influence inside the set", (each) => each.total > 0
      ? infoflow.percent(this.members(each).reduce((sum, s) => sum + (each.values[s] || 0), 0)
        / each.total) : "not measured");
  }

  // Tokens that one set holds and the other does not, or has not.
  alone() {
    const sets = this.pictures.map((each) => new Set(this.members(each)));
    return this.both("in this set alone", (each, side) => this.list([...sets[side]].filter((s) =>
      !sets[1 - side].has(this.maps[side].get(s))).map((s) => this.quoted(each, s))));
  }

  list(all, most = 12) {
    return all.length ? all.slice(0, most).join(", ")
      + (all.length > most ? `, … (${all.length})` : "") : "none";
  }

  // Both tokens of a pair, as one where they are the same.
  pairName(pair) {
    const [one, other] = pair.map((s, side) => this.quoted(this.pictures[side], s));
    return one === other ? one : `${one} and ${other}`;
  }

  quoted(picture, position) { return `${position} “${picture.token(position)}”`; }

  // The tokens whose shares of influence differ most.
  shifts() {
    const [one, other] = this.pictures;
    if (!(one.total > 0 && other.total > 0)) return [];
    const share = (each, s) => each.counts(s) ? (each.values[s] || 0) / each.total : 0;
    const tokens = this.data.aligned.filter(([a, b]) => a < one.input.tokens.length
      && b < other.input.tokens.length);
    const apart = ([a, b]) => Math.abs(share(one, a) - share(other, b));
    return tokens.sort((x, y) => apart(y) - apart(x)).slice(0, 3).filter((pair) => apart(pair) >= 0.005)
      .map((pair) => this.both(`share of influence of ${this.pairName(pair)}`, (each, side) =>
        infoflow.percent(share(each, pair[side]))));
  }

  // Heads up to the chosen layer that read another key first, at the chosen positions.
  choices() {
    const [one, other] = this.pictures, found = [];
    const first = (each, layer, head) => each.input.ranked[layer][(head * each.input.n_queries
      + each.state.position) * each.input.depths[layer]];
    let asked = 0;
    for (let layer = 0; layer <= Math.min(one.state.layer, other.state.layer); layer++) {
      if (one.input.heads[layer] !== other.input.heads[layer]) continue;
      for (let head = 0; head < one.input.heads[layer]; head++) {
        asked++;
        const keys = this.pictures.map((each) => first(each, layer, head));
        if (keys[0] >= 0 && this.maps[0].get(keys[0]) !== keys[1]) found.push([layer, head, keys]);
      }
    }
    const name = (each, key) => key < 0 ? "no key" : this.quoted(each, key);
    const rows = found.slice(0, 5).map(([layer, head, keys]) =>
      this.both(`first choice of head ${layer}.${head}`, (each, side) => name(each, keys[side])));
    const more = asked ? [[`heads with another first choice`, `${found.length} of ${asked}`, ""]] : [];
    return [...more, ...rows];
  }

  nextTokens() {
    const said = this.pictures.map((each) => each.nextAt(each.asked()));
    return said.some((each) => each.length) ? this.both("next tokens", (_, side) => said[side]
      .map(([token, chance]) => `${token} ${infoflow.percent(chance)}`).join(", ") || "not known") : null;
  }
};
