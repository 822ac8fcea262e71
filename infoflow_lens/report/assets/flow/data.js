// What the picture reads: numbers as words, and arrays out of the packed view. Needs d3.
const infoflow = {};
infoflow.number = d3.format(".3~g");
infoflow.percent = (x) => x > 0 && x < 0.0005 ? "<0.1%"
  : d3.format(x > 0 && x < 0.01 ? ".1%" : ".0%")(x);

// Writes texts where they are others than before: what stays costs no layout.
infoflow.write = (selection, text) => selection.each(function each(...of) {
  const said = String(text.apply(this, of));
  if (this.textContent !== said) this.textContent = said;
});

infoflow.halves = (() => {
  let table = null; // all 65536 float16 numbers
  return () => {
    if (table) return table;
    table = new Float32Array(65536);
    for (let bits = 0; bits < 65536; bits++) {
      const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, rest = bits & 1023;
      table[bits] = exponent === 0 ? sign * rest * 2 ** -24
        : exponent === 31 ? (rest ? NaN : sign * Infinity)
        : sign * (1 + rest / 1024) * 2 ** (exponent - 15);
    }
    return table;
  };
})();

infoflow.unpack = async function (packed) {
  const bytes = Uint8Array.from(atob(packed.blob), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const half = infoflow.halves();
  const read = ([kind, start, count]) => {
    const view = new DataView(buffer, start);
    if (kind === "key8") return Int32Array.from(new Uint8Array(buffer, start, count), (v) => v - 1);
    if (kind === "share8")
      return Float32Array.from(new Uint8Array(buffer, start, count), (v) => (v / 255) ** 2);
    const out = kind === "key16" ? new Int32Array(count) : new Float32Array(count);
    for (let i = 0; i < count; i++)
      out[i] = kind === "key16" ? view.getUint16(2 * i, true) - 1
        : kind === "half" ? half[view.getUint16(2 * i, true)] : view.getFloat32(4 * i, true);
    return out;
  };
  const all = (value) => value === null || value === undefined ? null
    : Array.isArray(value) && typeof value[0] === "string" && value.length === 3
      && typeof value[1] === "number" ? read(value)
    : Array.isArray(value) ? value.map(all)
    : typeof value === "object"
      ? Object.fromEntries(Object.entries(value).map(([name, v]) => [name, all(v)])) : value;
  return { ...packed, ...all(packed.arrays), arrays: null, blob: null };
};
