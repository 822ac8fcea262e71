// What is said: the sentence, the table, and the tip under the pointer.
const MOST_ROWS = 30; // of the table, until all are asked for [chosen]

Object.assign(infoflow.Picture.prototype, {
  drawTable() {
    const { input, state, paths } = this;
    const upward = state.layer < 0;
    const heads = upward ? ["layer", "positions"]
      : ["position", "token", "in the predicted set", "strength", "measured influence",
        "share of influence", "best path"];
    const rows = [];
    if (upward)
      input.heads.forEach((_, layer) => rows.push([layer, this.held(layer)
        .map((t) => `${t} “${this.token(t)}”`).join(", ")]));
    else
      input.tokens.forEach((token, s) => {
        const inside = this.inSet(s), own = s === state.position, share = this.share(s);
        if (!inside && !own && !(share >= 0.1)) return;
        const missing = Number.isNaN(this.values[s]);
        rows.push([s, token, own && inside ? "own token" : inside ? "yes" : "no",
          inside && !own ? infoflow.number(paths.best[0][s]) : "–",
          missing ? "not measured" : infoflow.number(this.values[s]),
          missing || !this.counts(s) ? "–" : infoflow.percent(this.values[s] / this.total),
          inside ? this.pathOf(s) : "–"]);
      });
    if (!upward) {
      const by = (row) => row[0] === state.position ? Infinity : paths.best[0][row[0]];
      rows.sort((a, b) => by(b) - by(a) || (this.values[b[0]] || 0) - (this.values[a[0]] || 0));
    }
    const all = rows.length, most = this.allRows ? Infinity : MOST_ROWS;
    const count = upward ? "" : `; ${all} ${all === 1 ? "row" : "rows"}, the `
      + "strongest first, then others with at least a tenth of the largest influence";
    this.caption.text((upward
      ? `States that hold ${this.stateName(-1, state.position)}`
      : `What ${this.stateName(state.layer, state.position)} can hold`) + count);
    const row = (part, data) => this.table.selectAll(part).data([0]).join(part).selectAll("tr")
      .data(data).join("tr");
    infoflow.write(row("thead", [heads]).selectAll("th").data((d) => d).join("th")
      .attr("scope", "col"), (d) => d);
    if (!rows.length) rows.push(["The set is empty."]);
    const cells = row("tbody", rows.slice(0, most)).selectAll("td").data((d) => d).join((enter) =>
      enter.append("td").attr("dir", "auto"));
    infoflow.write(cells, (d) => d);
    cells.filter((_, i) => upward || ![3, 5].includes(i)).filter(".bar").attr("class", null);
    if (!upward && all) { // bars on the scales of the frames and of the shade
      const bar = (column, share, kind) => cells.filter((_, i) => i === column)
        .each((_, i, nodes) => {
          const source = Number(nodes[i].parentNode.firstChild.textContent);
          const own = source === state.position;
          d3.select(nodes[i]).attr("class", own ? null : `bar ${kind}`)
            .style("--share", own ? null : `${Math.round(100 * (share(source) || 0))}%`);
        });
      bar(3, (s) => this.level(paths.best[0][s]), "strength");
      bar(5, (s) => this.share(s), "influence");
    }
    this.moreRows.attr("hidden", all > most ? null : true)
      .text(`Show the other ${all - most} rows`);
  },

  // The states after a layer that hold the chosen token.
  held(layer) {
    return Array.from(this.paths.best[layer + 1].keys())
      .filter((t) => this.paths.best[layer + 1][t] >= 0);
  },

  pathOf(source) {
    const path = infoflow.bestPath(this.paths, 0, source);
    if (!path) return "–";
    if (!path.length) return "residual stream";
    return path.map((i) => this.paths.lines.at(i))
      .map((l) => `layer ${l.layer} head ${l.head} from ${l.key}`).join(", then ");
  },

  // The sentence above the picture, which screen readers say when it changes.
  say() {
    const { input, state } = this;
    const lines = this.sayLines();
    this.hint.attr("hidden", true);
    if (state.layer < 0) {
      const above = input.heads.map((_, layer) => `${this.held(layer).length} in layer ${layer}`);
      this.status.text(`States that can hold ${this.stateName(-1, state.position)}: `
        + `${above.join(", ")}.${lines}`);
      return;
    }
    const members = input.tokens.map((_, s) => s).filter((s) => this.inSet(s));
    const others = members.filter((s) => this.counts(s));
    const possible = input.possible ? input.possible[state.layer * input.n_queries + state.position]
      : input.tokens.filter((_, s) =>
        this.counts(s) && (!input.causal || s < state.position)).length;
    const name = this.stateName(state.layer, state.position);
    let text = `${name[0].toUpperCase()}${name.slice(1)} can hold `
      + (others.length ? `${others.length} of ${possible} other tokens` : "no other token")
      + (members.includes(state.position) ? " and its own." : ".");
    const full = others.length === possible && possible > 0;
    if (input.influence) {
      if (full) text += " That is every token that it could hold, so that the set excludes nothing"
        + (others.length > 1 ? "; strengths rank them." : ".");
      if (Number.isNaN(this.largest) && others.length) {
        text += " Influence on it was not measured.";
        this.hint.text(this.data.unmeasured).attr("hidden", this.data.unmeasured ? null : true);
      }
      else if (!(this.total > 0)) text += " No other token has any measured influence on it.";
      else if (others.length) text += this.sayShares(others, possible, full);
    } else text += " Influence was not measured.";
    this.status.text(text + lines);
  },

  // How many lines are drawn, and which share of the influence they reach.
  sayLines() {
    const { drawn, reached, state } = this, all = this.paths.lines.length;
    if (drawn.length === all) return "";
    const share = reached && reached[drawn.length - 1];
    return ` ${drawn.length} of ${all} lines are drawn, the strongest paths first`
      + (!reached ? "." : state.most === null && share >= ENOUGH - 1e-6
        ? ": enough to reach 90% of the measured influence inside the set."
        : `; they reach ${infoflow.percent(share)} of the measured influence inside the set.`);
  },

  // How much of the measured influence of other tokens the strongest have, beside chance: as many
  // as hold 90% of it together. Influence is counted as it is shaded: not squared.
  sayShares(others, possible, full) {
    const { percent } = infoflow, { best } = this.paths;
    const value = (s) => this.values[s] || 0, sum = (all) => all.reduce((a, s) => a + value(s), 0);
    const largest = this.input.tokens.map((_, s) => s).filter((s) => this.counts(s))
      .sort((a, b) => value(b) - value(a));
    let needed = 0;
    for (let held = 0; held < 0.9 * this.total * (1 - 1e-6); needed++) held += value(largest[needed]);
    const n = Math.min(needed, others.length);
    const strongest = [...others].sort((a, b) => best[0][b] - best[0][a]).slice(0, n);
    const share = (sources) => percent(sum(sources) / this.total);
    let text = "";
    if (n < others.length || !full)
      text += ` ${n > 1 ? `Its ${n} strongest tokens have` : "Its strongest token has"} `
        + `${share(strongest)} of the measured influence of other tokens (${n} at random: `
        + `${percent(n / possible)}; the best ${n}: ${share(largest.slice(0, n))}).`;
    if (n < others.length && !full)
      text += ` All ${others.length} have ${share(others)} (at random: `
        + `${percent(others.length / possible)}).`;
    return text;
  },

  describe(layer, position, brief = false) {
    const { input, state } = this, name = `position ${position} “${this.token(position)}”`;
    if (layer < 0) {
      if (position >= input.tokens.length) return [`${name}: no token of its own`];
      const lines = [name];
      if (state.layer < 0) return lines;
      const inside = this.inSet(position), own = position === state.position;
      lines.push(own ? "own token: kept by the residual stream"
        : this.leftOut.has(position) ? "left out, no candidate"
        : inside ? `in the predicted set, strength ${infoflow.number(this.paths.best[0][position])}`
        : "not in the predicted set");
      const value = this.values[position];
      lines.push(Number.isNaN(value) ? "influence not measured"
        : `influence ${infoflow.number(value)}` + (!this.counts(position) || !(this.total > 0) ? ""
          : `, ${infoflow.percent(value / this.total)} of that of all other tokens`));
      if (inside && !own && !brief) lines.push(this.pathOf(position));
      return lines;
    }
    let size = 0;
    for (let s = 0; s < input.tokens.length; s++)
      size += infoflow.has(this.found.sets[layer + 1], this.found.words, position, s);
    const lines = [`after layer ${layer}, ${name}: ${size} tokens in its set`];
    const depth = input.depths[layer];
    for (let head = 0; head < Math.min(8, input.heads[layer]); head++) {
      const at = (head * input.n_queries + position) * depth;
      const key = depth ? input.ranked[layer][at] : -1;
      if (key < 0) { lines.push(`head ${head}: reads no key`); continue; }
      const known = input.weights && !Number.isNaN(input.weights[layer][at]);
      lines.push(`head ${head} reads ${key} “${this.token(key)}” most`
        + (this.leftOut.size ? " of those that are not left out" : "")
        + (known ? `, weight ${infoflow.number(input.weights[layer][at])}` : "")
        + (input.scores ? `, score ${infoflow.number(input.scores[layer][at])}` : "")
        + (state.off[layer].has(head) ? " (off)" : ""));
    }
    if (input.heads[layer] > 8) lines.push(`and ${input.heads[layer] - 8} other heads`);
    return lines;
  },

  describeLine(line) {
    return [
      `layer ${line.layer}, head ${line.head}: ${line.query} “${this.token(line.query)}” reads `
        + `${line.key} “${this.token(line.key)}”`,
      `weight ${infoflow.number(line.weight)}`,
      `strength of the best path through it ${infoflow.number(line.strength)}`,
    ];
  },

  mark() {
    const at = this.state.hover;
    const any = Boolean(at || this.places.all.size);
    if (!any && !this.anyMark) return;
    this.anyMark = any;
    const under = (t) => Boolean(at && at.layer < 0 && at.position === t);
    const found = (t) => this.places.all.has(t);
    this.text.selectAll("span.token").classed("under", under).classed("found", found);
    this.figure.svg.selectAll("text.label").classed("under", under).classed("found", found);
  },

  tell(what) {
    const tip = this.tip;
    tip.attr("hidden", what ? null : true);
    if (!what) return;
    tip.selectAll("div").data([].concat(what.text)).join("div").attr("dir", "auto").text((d) => d);
    const box = tip.node().getBoundingClientRect();
    const x = Math.min(what.x + 14, innerWidth - box.width - 8);
    const y = what.y + 18 + box.height > innerHeight ? what.y - box.height - 12 : what.y + 18;
    tip.style("left", `${Math.max(4, x)}px`).style("top", `${Math.max(4, y)}px`);
  },
});
