// Information sets: how heads move them (the rules of Sec. 5.1), as bits.

// How a head moves sets, as describe() of the view says: for all heads, or for each.
infoflow.move = (input, rule, layer, head) =>
  Array.isArray(input.moves[rule]) ? input.moves[rule][layer][head] : input.moves[rule];

// Where the keys that a head moves are listed: rows of so many keys, of which it moves the first.
infoflow.listOf = function (input, rule, k, layer, head) {
  const move = infoflow.move(input, rule, layer, head), own = Boolean(move.keys);
  const width = own ? move.width : input.depths[layer];
  return {
    keys: own ? move.keys : input.ranked[layer], width, ranked: !own,
    most: Math.min(own ? width : move.most ?? k, width), first: own ? 0 : head * input.n_queries * width,
  };
};

// The keys that a head moves to a query, one call each: the key, and its place among the ranked
// keys of the head (-1 where the rule does not take them from there).
infoflow.eachKey = function (input, rule, k, layer, head, query, visit) {
  const list = infoflow.listOf(input, rule, k, layer, head);
  const { keys, most, ranked } = list, row = list.first + query * list.width;
  for (let i = 0; i < most; i++) if (keys[row + i] >= 0) visit(keys[row + i], ranked ? i : -1);
};

infoflow.has = (sets, words, position, source) =>
  (sets[position * words + (source >> 5)] >>> (source & 31)) & 1;

// Sets below the first layer and after each, as bits; off[layer] is a Set of heads.
infoflow.propagate = function (input, rule, k, off) {
  const n = input.n_queries, nSource = input.tokens.length, words = Math.ceil(nSource / 32);
  let below = new Uint32Array(n * words);
  for (let s = 0; s < nSource; s++) below[s * words + (s >> 5)] |= 1 << (s & 31);
  const sets = [below];
  input.heads.forEach((nHeads, layer) => {
    const above = below.slice(), from = below;
    for (let head = 0; head < nHeads; head++) {
      if (off[layer].has(head)) continue;
      const list = infoflow.listOf(input, rule, k, layer, head);
      for (let query = 0; query < n; query++)
        for (let i = 0, at = list.first + query * list.width; i < list.most; i++, at++) {
          const key = list.keys[at];
          if (key < 0) continue;
          for (let w = 0; w < words; w++) above[query * words + w] |= from[key * words + w];
        }
    }
    sets.push(above);
    below = above;
  });
  return { sets, words };
};
