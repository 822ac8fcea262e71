// What the picture is made of: its controls, its panels, its table and notes.
Object.assign(infoflow.Picture.prototype, {
  build() {
    const { data, state, box } = this;
    if (data.title) box.append("h3").text(data.title);
    else box.attr("aria-label", "information flow");
    const bar = this.bar = box.append("div").attr("class", "controls");
    if (data.groups.length > 1) {
      this.groupButtons = bar.append("div").attr("class", "choice").attr("role", "group")
        .attr("aria-label", "model").selectAll("button").data(data.groups).join("button")
        .attr("type", "button").text((g) => g.name)
        .on("click", (_, g) => this.show(g.first + (state.input - this.group().first) % g.count));
    }
    if (data.inputs.length > 1) {
      const choice = bar.append("label").text("input ");
      this.inputs = choice.append("select").attr("class", "input")
        .on("change", (event) => this.show(Number(event.target.value)));
    }
    const rule = bar.append("label").attr("class", "rule").text("rule ");
    this.rules = rule.append("select").on("change", (event) => {
      state.rule = event.target.value;
      this.update();
    });
    this.rules.selectAll("option").data(Object.entries(data.rules)).join("option")
      .attr("value", (r) => r[0]).text((r) => r[1]);
    this.k = bar.append("label").attr("class", "k").text("k ");
    this.k.append("input").attr("type", "range").attr("min", 1).on("input", (event) => {
      state.k = Number(event.target.value);
      this.update();
    });
    this.k.append("output");
    this.layer = bar.append("label").attr("class", "layer").text("state after layer ");
    this.layer.append("input").attr("type", "range").attr("min", 0).on("input", (event) => {
      state.layer = Number(event.target.value);
      this.update();
    });
    this.layer.append("output");
    this.most = bar.append("label").attr("class", "lines").text("lines drawn ");
    this.most.append("input").attr("type", "range").attr("min", 1).on("input", (event) => {
      state.most = Number(event.target.value);
      this.updateLines();
    });
    this.most.append("output");
    this.enough = bar.append("button").attr("type", "button").attr("class", "enough")
      .attr("title", "the strongest lines, up to those that reach 90% of the measured influence "
        + `inside the set, but at most ${MOST_LINES}`)
      .text("up to 90%").on("click", () => { state.most = null; this.updateLines(); });
    this.buildSearch(bar);
    this.buildLink(bar);
    this.buildSaving(bar);
    this.status = box.append("p").attr("class", "status").attr("aria-live", "polite");
    this.hint = box.append("p").attr("class", "hint").attr("hidden", true);
    this.text = box.append("div").attr("class", "text").attr("role", "group")
      .attr("aria-label", "tokens; press one to choose its state");
    this.legend = box.append("p").attr("class", "legend");
    this.buildNext(box);
    const columns = this.columns = box.append("div").attr("class", "columns");
    const main = columns.append("div").attr("class", "main");
    this.figure = this.panel(main, "flow", "Which head passes what to which state");
    this.measured = this.panel(main, "edges", "Measured: which state moves which state above it");
    const side = columns.append("div").attr("class", "side");
    this.why = side.append("figure").attr("class", "why").attr("aria-live", "polite")
      .attr("hidden", true);
    this.buildHeads(side);
    const table = box.append("details").attr("class", "table").attr("open", true);
    table.append("summary").text("This set as a table");
    this.caption = table.append("p").attr("class", "caption");
    this.table = table.append("div").attr("class", "scroll").attr("tabindex", 0)
      .attr("role", "region").attr("aria-label", "the set as a table").append("table");
    this.moreRows = table.append("button").attr("type", "button").attr("hidden", true)
      .on("click", () => { this.allRows = true; this.drawTable(); });
    this.notes = box.append("div").attr("class", "notes");
    this.notes.selectAll("p").data(data.notes).join("p").text((note) => note);
    if (Object.keys(data.record).length) {
      const record = box.append("details");
      record.append("summary").text("Record of the run");
      record.append("pre").text(JSON.stringify(data.record, null, 2));
    }
    this.tip = box.append("div").attr("class", "tip").attr("role", "tooltip").attr("hidden", true);
    let width = 0;
    new ResizeObserver(([entry]) => {
      if (Math.abs(entry.contentRect.width - width) < 4) return;
      width = entry.contentRect.width;
      this.room = null;
      if (this.input) this.drawFlow();
    }).observe(columns.node());
  },

  panel(parent, name, title) {
    const figure = parent.append("figure").attr("class", name);
    figure.append("figcaption").text(title);
    const view = figure.append("p").attr("class", "view");
    const body = figure.append("div").attr("class", "body");
    const names = body.append("div").attr("class", "names").attr("aria-hidden", "true");
    const heading = body.append("div").attr("class", "heading");
    const scroll = body.append("div").attr("class", "scroll");
    const stage = scroll.append("div").attr("class", "stage").attr("tabindex", 0)
      .attr("role", "application").attr("aria-label",
        "states by layer and position; arrow keys move, Enter chooses, Escape goes back");
    const canvas = stage.append("canvas").attr("aria-hidden", "true");
    const svg = stage.append("svg"), hidden = (name) => svg.append("g").attr("class", name)
      .attr("aria-hidden", "true");
    const residual = hidden("residual");
    const lines = svg.append("g").attr("class", "drawn").attr("role", "group")
      .attr("aria-label", "lines, the strongest paths first; arrow keys move, Enter says why");
    const [states, numbers, labels] = ["states", "numbers", "labels"].map(hidden);
    const legend = figure.append("p").attr("class", "legend");
    const made = {
      figure, scroll, heading, names, stage, canvas, svg, residual, lines, states, numbers, labels,
      legend, view,
    };
    const place = (event) => this.placeAt(stage.node(), event);
    stage.on("click", (event) => {
      const at = place(event);
      if (at) this.select(at.layer, at.position);
    }).on("pointermove", (event) => {
      if (event.pointerType === "touch") return;
      const at = place(event);
      this.point(at && { ...at, x: event.clientX, y: event.clientY });
    }).on("pointerleave", () => this.point(null))
      .on("keydown", (event) => this.key(event, stage.node()))
      .on("blur", () => {
        if (!this.state.cursor) return;
        this.state.cursor = null;
        this.point(null);
        this.drawStates();
      });
    scroll.on("scroll", () => { if (this.input) this.drawSeen(made); });
    return made;
  },

  buildHeads(side) {
    const { state } = this;
    const figure = side.append("figure").attr("class", "heads");
    figure.append("figcaption").text("Heads, a row for each layer");
    const clicks = figure.append("div").attr("class", "choice").attr("role", "group")
      .attr("aria-label", "what a press on a head does");
    this.clicks = clicks.selectAll("button")
      .data([["open", "open its pattern"], ["switch", "switch it on or off"]])
      .join("button").attr("type", "button").text((d) => d[1])
      .on("click", (_, d) => { state.clicks = d[0]; this.drawHeads(); });
    this.heads = figure.append("div").attr("class", "scroll").append("div").attr("class", "matrix")
      .attr("role", "group").attr("aria-label",
        "heads; arrow keys move, Enter opens the pattern, Space switches on or off");
    const all = figure.append("div").attr("class", "choice");
    all.append("button").attr("type", "button").attr("class", "all-on").text("all on")
      .on("click", () => { state.off.forEach((heads) => heads.clear()); this.update(); });
    all.append("button").attr("type", "button").attr("class", "all-off").text("all off")
      .on("click", () => {
        state.off = this.input.heads.map((n) => new Set(Array.from({ length: n }, (_, h) => h)));
        this.update();
      });
    figure.append("p").attr("class", "legend").text("Colours are those of the lines, each head's own "
      + "in its layer, beside its number. Pale: on no path of the chosen state. Dashed: off.");
    this.pattern = side.append("figure").attr("class", "pattern").attr("hidden", true);
  },
});
