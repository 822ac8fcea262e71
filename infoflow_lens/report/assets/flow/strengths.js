// Graded paths: how strongly sources reach a state. The strength of a path is the product of the
// attention weights of its lines; the residual stream counts 1. What has several paths has the
// strength of the best. A line is a head that moves a key to a query: [layer, head, key, query].

// The keys that a head moves to a query, with their weights. Heads whose weights were not kept
// share them equally among the keys that they move.
infoflow.eachWeight = function (input, rule, k, layer, head, query, visit) {
  const n = input.n_queries, depth = input.depths[layer], row = (head * n + query) * depth;
  const weights = input.weights && input.weights[layer], ranked = input.ranked[layer];
  const pattern = input.patterns && input.patterns[layer];
  const width = pattern ? pattern.length / (input.heads[layer] * n) : 0;
  const move = infoflow.move(input, rule, layer, head);
  const last = row + Math.min(move.most ?? k, depth) - 1;
  if (!move.keys && weights && !Number.isNaN(weights[last])) { // as nearly always
    for (let at = row; at <= last; at++)
      if (ranked[at] >= 0) visit(ranked[at], Math.min(1, weights[at]));
    return;
  }
  let equal = NaN;
  const share = () => {
    let moved = 0;
    infoflow.eachKey(input, rule, k, layer, head, query, () => { moved++; });
    return 1 / moved;
  };
  infoflow.eachKey(input, rule, k, layer, head, query, (key, rank) => {
    let weight = NaN;
    if (weights) {
      const at = rank >= 0 ? rank : ranked.subarray(row, row + depth).indexOf(key);
      if (at >= 0) weight = weights[row + at];
    }
    if (Number.isNaN(weight) && key < width) weight = pattern[(head * n + query) * width + key];
    if (Number.isNaN(weight)) {
      if (Number.isNaN(equal)) equal = share();
      weight = equal;
    }
    visit(key, Math.min(1, weight)); // ReLU attention may weigh a key more than once
  });
};

// Lines one behind the other: what they are, and their numbers.
infoflow.Lines = class {
  constructor(room) {
    this.length = 0;
    this.room = room;
    for (const name of ["layer", "head", "key", "query"]) this[name] = new Int32Array(room);
    for (const name of ["weight", "strength"]) this[name] = new Float64Array(room);
  }

  add(layer, head, key, query, weight, strength) {
    const at = this.length++;
    this.layer[at] = layer; this.head[at] = head; this.key[at] = key; this.query[at] = query;
    this.weight[at] = weight; this.strength[at] = strength;
    return at;
  }

  at(i) {
    return {
      layer: this.layer[i], head: this.head[i], key: this.key[i], query: this.query[i],
      weight: this.weight[i], strength: this.strength[i],
    };
  }
};

// The most keys that the heads move to the queries.
infoflow.mostLines = function (input, rule, k) {
  let most = 0;
  input.heads.forEach((heads, layer) => {
    for (let head = 0; head < heads; head++)
      most += input.n_queries * infoflow.listOf(input, rule, k, layer, head).most;
  });
  return most;
};

// All paths to a state, or, for the row of tokens (layer -1), from a token upwards.
// best[level][position] is the strength of the best path between the state at that level (0 for
// tokens, l + 1 after layer l) and the chosen one, -1 where there is none; via the line on which
// that path goes on towards the chosen state, -1 for the residual stream.
// Lines of a picture before may be overwritten.
infoflow.paths = function (input, rule, k, off, found, selected, before = null) {
  const n = input.n_queries, levels = input.heads.length + 1;
  const room = infoflow.mostLines(input, rule, k);
  const lines = before && before.room >= room ? before : new infoflow.Lines(room);
  lines.length = 0;
  const best = Array.from({ length: levels }, () => new Float64Array(n).fill(-1));
  const via = Array.from({ length: levels }, () => new Int32Array(n).fill(-1));
  const upward = selected.layer < 0, start = selected.layer + 1;
  const holds = (level, position) => infoflow.holdsAny(input, found, level, position);
  if (holds(start, selected.position)) best[start][selected.position] = 1;
  const layers = upward ? input.heads.map((_, layer) => layer)
    : Array.from({ length: start }, (_, i) => start - 1 - i);
  for (const layer of layers) {
    const from = best[upward ? layer : layer + 1], to = best[upward ? layer + 1 : layer];
    const onwards = via[upward ? layer + 1 : layer];
    for (let position = 0; position < n; position++)
      if (from[position] >= 0 && holds(layer, position)) to[position] = from[position];
    for (let query = 0; query < n; query++) {
      if (!upward && from[query] < 0) continue;
      for (let head = 0; head < input.heads[layer]; head++) {
        if (off[layer].has(head)) continue;
        infoflow.eachWeight(input, rule, k, layer, head, query, (key, weight) => {
          // a key that is the query brings nothing that the residual stream does not
          if (key === query || (upward ? from[key] < 0 : !holds(layer, key))) return;
          const strength = from[upward ? key : query] * weight, end = upward ? query : key;
          const line = lines.add(layer, head, key, query, weight, strength);
          if (strength > to[end]) { to[end] = strength; onwards[end] = line; }
        });
      }
    }
  }
  return { lines, best, via, selected, upward };
};

infoflow.holdsAny = function (input, { sets, words }, level, position) {
  if (position < input.tokens.length) return true; // its own token
  for (let w = 0; w < words; w++) if (sets[level][position * words + w]) return true;
  return false;
};

// Goes along the best path from a state to the chosen one: visit(level, line, position), where line
// is -1 for the residual stream.
infoflow.follow = function ({ lines, via, selected, upward }, level, position, visit) {
  for (let at = level; at !== selected.layer + 1; at += upward ? -1 : 1) {
    const line = via[at][position];
    visit(at, line, position);
    if (line >= 0) position = upward ? lines.key[line] : lines.query[line];
  }
};

// The lines of the best path between a state and the chosen one, from the state on.
infoflow.bestPath = function (paths, level, position) {
  if (paths.best[level][position] < 0) return null;
  const path = [];
  infoflow.follow(paths, level, position, (_, line) => { if (line >= 0) path.push(line); });
  return path;
};

// Where the residual stream carries the paths of some lines: "level,position" for each step from
// that level to the next one up. The key of a line is a token that came up to it.
infoflow.residual = function (paths, shown, where = new Set()) {
  const { lines, upward, selected } = paths;
  const along = (level, position) => infoflow.follow(paths, level, position, (at, line, here) => {
    if (line < 0) where.add(`${upward ? at - 1 : at},${here}`);
  });
  for (const i of shown) {
    along(upward ? lines.layer[i] : lines.layer[i] + 1, upward ? lines.key[i] : lines.query[i]);
    if (!upward) for (let at = 0; at < lines.layer[i]; at++) where.add(`${at},${lines.key[i]}`);
  }
  if (!upward && paths.best[0][selected.position] >= 0) along(0, selected.position);
  return where;
};

// The states on the paths of some lines and the residual stream: a flag for each, by level.
infoflow.touched = function ({ lines, best }, shown, residual) {
  const on = best.map((level) => new Uint8Array(level.length));
  for (const i of shown) on[lines.layer[i]][lines.key[i]] = on[lines.layer[i] + 1][lines.query[i]] = 1;
  for (const step of residual) {
    const [level, position] = step.split(",").map(Number);
    on[level][position] = on[level + 1][position] = 1;
  }
  return on;
};

// The share of what tokens have, by `amount`, that is reached once so many lines are drawn: the sums
// over lines in their order. A token is reached by the last line of its best path, which is the one
// that begins at it.
infoflow.reach = function (paths, order, amount) {
  const ends = new Map();
  let total = 0;
  paths.best[0].forEach((_, source) => {
    const path = infoflow.bestPath(paths, 0, source), size = amount(source);
    if (!path || !path.length || !(size > 0)) return;
    total += size;
    ends.set(path[0], (ends.get(path[0]) || 0) + size);
  });
  let sum = 0;
  return total > 0 ? order.map((line) => (sum += ends.get(line) || 0) / total) : null;
};

// So many lines: first each token's best path, the strongest first; then the other lines. Upwards
// the best paths are those of states. A line never comes before those by which it goes on.
infoflow.strongest = function (paths, most) {
  const { lines, best, via, upward } = paths, first = new Uint8Array(lines.length);
  const ends = upward ? best.map((_, level) => level) : [0];
  for (const end of ends)
    best[end].forEach((_, position) => {
      for (const line of infoflow.bestPath(paths, end, position) || []) first[line] = 1;
    });
  const order = (a, b) => first[b] - first[a] || lines.strength[b] - lines.strength[a]
    || (upward ? lines.layer[a] - lines.layer[b] : lines.layer[b] - lines.layer[a]) || a - b;
  const chosen = [];
  for (let i = 0; i < lines.length; i++) if (first[i]) chosen.push(i);
  const room = most - chosen.length, rest = [];
  let least = 0; // what is weaker has no place any more
  for (let i = 0; room > 0 && i < lines.length; i++) {
    if (first[i] || lines.strength[i] < least) continue;
    if (rest.push(i) < 4 * room) continue;
    rest.sort(order).length = room;
    least = lines.strength[rest[room - 1]];
  }
  chosen.push(...rest.sort(order).slice(0, Math.max(0, room)));
  return chosen.sort(order).slice(0, most);
};
