// Pictures to save: what is seen, as an SVG file that needs nothing else, and as a PNG of it.
const SVG = "http://www.w3.org/2000/svg";

// Draws as a canvas does, into an SVG group.
infoflow.SvgPen = class {
  constructor(group) {
    Object.assign(this, { group, globalAlpha: 1, lineWidth: 1, strokeStyle: "none", fillStyle: "none" });
    this.beginPath();
    this.setLineDash([]);
  }

  put(name, attributes) {
    const node = this.group.appendChild(document.createElementNS(SVG, name));
    if (this.globalAlpha < 1) attributes.opacity = this.globalAlpha;
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  }

  beginPath() { this.path = ""; }
  moveTo(x, y) { this.path += `M${x},${y}`; }
  lineTo(x, y) { this.path += `L${x},${y}`; }
  bezierCurveTo(...at) { this.path += `C${at.join(",")}`; }
  arc(x, y, r) { this.path += `M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0`; }
  setLineDash(dash) { this.dash = dash.join(" "); }

  stroke() {
    this.put("path", {
      d: this.path, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth,
      ...(this.dash ? { "stroke-dasharray": this.dash } : {}),
    });
  }

  fillRect(x, y, width, height) { this.put("rect", { x, y, width, height, fill: this.fillStyle }); }

  strokeRect(x, y, width, height) {
    this.put("rect", {
      x, y, width, height, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth,
    });
  }
};

// A part of the page as SVG: boxes, text line by line, and drawings, all with styles of their own.
infoflow.Copy = class {
  constructor(picture, root, x, y) {
    Object.assign(this, { picture, root, x, y });
    this.pen = new infoflow.SvgPen(root);
  }

  add(node) {
    const style = getComputedStyle(node), box = node.getBoundingClientRect();
    if (style.display === "none" || !box.width || node.matches("button, label")) return;
    if (node.classList.contains("scroll")) { this.addStage(node, box); return; }
    this.addBox(node, style, box);
    for (const child of node.childNodes) {
      if (child.nodeType === Node.TEXT_NODE) this.addText(child, style);
      else if (child.nodeType === Node.ELEMENT_NODE) this.add(child);
    }
  }

  addBox(node, style, box) {
    const { pen, picture: { colours } } = this, has = (name) => node.classList.contains(name);
    const x = box.x - this.x, y = box.y - this.y, radius = Math.min(parseFloat(style.borderTopLeftRadius)
      * (style.borderTopLeftRadius.endsWith("%") ? box.width / 100 : 1) || 0, box.height / 2);
    const rect = (given) => pen.put("rect",
      { x, y, width: box.width, height: box.height, rx: radius, fill: "none", ...given });
    const fill = style.backgroundColor;
    if (has("hatched") || has("unmeasured")) rect({ fill: "url(#hatched)" });
    if (has("shade")) rect({ fill: "url(#shade)" });
    if (has("many"))
      [0, 1, 2].forEach((head) => pen.put("rect", {
        x: x + head * box.width / 3, y, width: box.width / 3, height: box.height, fill: colours.head(head, 3),
      }));
    if (!/^rgba\(.*, 0\)$|transparent/.test(fill)) rect({ fill });
    if (has("found") || has("find"))
      rect({ stroke: style.outlineColor, "stroke-width": 2, "stroke-dasharray": "4 3" });
    if (has("marked")) rect({ stroke: "#d1322d", "stroke-width": 3 });
    const sides = ["Top", "Bottom"].map((side) => parseFloat(style[`border${side}Width`]));
    const line = (side, width) => ({
      stroke: style[`border${side}Color`], "stroke-width": width, opacity: style.opacity,
      ...(style[`border${side}Style`] === "dotted" ? { "stroke-dasharray": "2 3" } : {}),
    });
    if (sides[0] > 0 && sides[1] > 0)
      rect({
        x: x + sides[0] / 2, y: y + sides[0] / 2, width: box.width - sides[0],
        height: box.height - sides[0], ...line("Top", sides[0]),
      });
    else if (sides[1] > 0)
      pen.put("path", {
        d: `M${x},${y + box.height - sides[1] / 2}h${box.width}`, ...line("Bottom", sides[1]),
      });
  }

  // A text node, a line at a time, as wide as it stands, whatever fonts the reader has.
  addText(node, style) {
    const text = node.textContent, range = document.createRange();
    let line = null;
    const end = () => {
      if (line && line.text.trim()) this.write(line.text, line.box, style);
      line = null;
    };
    for (const word of text.matchAll(/\s*\S+\s*?|\s+/g)) {
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const all = [...range.getClientRects()], last = all.at(-1);
      if (!last) continue;
      const same = all.filter((one) => Math.abs(one.bottom - last.bottom) < 3); // spaces may be apart
      const from = Math.min(...same.map((one) => one.left));
      const box = new DOMRect(from, last.y, last.right - from, last.height);
      if (line && Math.abs(line.box.bottom - box.bottom) > 3) end();
      if (!line) line = { text: word[0], box };
      else {
        line.text += word[0];
        line.box.width = box.right - line.box.x;
      }
    }
    end();
  }

  write(text, box, style) {
    const size = parseFloat(style.fontSize), mono = style.fontFamily.includes("mono");
    const shown = text.trim(), lost = text.length - text.trimStart().length;
    const by = box.width / Math.max(1, style.whiteSpace.startsWith("pre") ? [...text].length
      : [...shown].length), indent = style.whiteSpace.startsWith("pre") ? lost * by : 0;
    this.pen.put("text", {
      x: box.x - this.x + indent, y: box.y - this.y + box.height / 2 + size * 0.35,
      fill: style.color, "font-size": size, "font-weight": style.fontWeight,
      "font-family": mono ? "ui-monospace, Menlo, Consolas, monospace" : "system-ui, sans-serif",
      ...([...shown].length > 1 ? {
        textLength: style.whiteSpace.startsWith("pre") ? by * [...shown].length : box.width,
        lengthAdjust: "spacingAndGlyphs",
      } : {}),
      ...(style.textDecorationLine === "underline" ? { "text-decoration": "underline" } : {}),
    }).textContent = shown;
  }

  // The seen part of a stage: what its canvas has, drawn anew, and its drawing.
  addStage(node, box) {
    const { picture } = this, panel = picture.panels().find((one) => one.scroll.node() === node);
    if (!panel) return;
    const seen = this.pen.put("svg", {
      x: box.x - this.x, y: box.y - this.y, width: box.width, height: box.height,
      viewBox: `${node.scrollLeft} 0 ${box.width} ${box.height}`,
    });
    const canvas = new infoflow.SvgPen(seen.appendChild(document.createElementNS(SVG, "g")));
    if (panel === picture.figure) picture.drawStrips(canvas);
    else picture.drawMeasured(canvas);
    seen.append(...[...panel.svg.node().childNodes].map((child) => this.styled(child)));
  }

  styled(node) {
    const copy = node.cloneNode(false), style = getComputedStyle(node);
    for (const { name } of [...copy.attributes])
      if (/^(style|class|role|tabindex|aria-|data-)/.test(name)) copy.removeAttribute(name);
    if (!node.children.length)
      for (const name of ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity",
        "stroke-dasharray", "opacity", "paint-order"])
        copy.setAttribute(name, style.getPropertyValue(name));
    if (node.tagName === "text") {
      for (const name of ["font-size", "font-weight", "text-anchor"])
        copy.setAttribute(name, style.getPropertyValue(name));
      copy.setAttribute("font-family", style.fontFamily.includes("mono")
        ? "ui-monospace, Menlo, Consolas, monospace" : "system-ui, sans-serif");
      copy.textContent = node.textContent;
      return copy;
    }
    for (const child of node.children)
      if (!child.classList.contains("hit")) copy.append(this.styled(child));
    return copy;
  }
};

// The height of the controls below the title of a picture, which are not saved.
function skipped({ box, bar }) {
  return box.node().contains(bar.node()) ? bar.node().getBoundingClientRect().height : 0;
}

// Pictures beside each other as one drawing, from their titles to their legends.
infoflow.draw = function (pictures) {
  const boxes = pictures.map((picture) => picture.box.node().getBoundingClientRect());
  const left = Math.min(...boxes.map((box) => box.left)), top = Math.min(...boxes.map((box) => box.top));
  const bottom = (picture) => Math.max(...picture.panels().map((panel) =>
    panel.figure.node().getBoundingClientRect().bottom));
  const width = Math.max(...boxes.map((box) => box.right)) - left;
  const height = Math.max(...pictures.map((picture) => bottom(picture) - skipped(picture))) - top + 10;
  const svg = document.createElementNS(SVG, "svg"), { colours } = pictures[0];
  const set = (node, given) => {
    for (const [name, value] of Object.entries(given)) node.setAttribute(name, value);
    return node;
  };
  set(svg, { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}` });
  const make = (parent, name, given) =>
    set(parent.appendChild(document.createElementNS(SVG, name)), given);
  const shared = make(svg, "defs", {});
  const hatched = make(shared, "pattern",
    { id: "hatched", width: 5, height: 5, patternUnits: "userSpaceOnUse" });
  make(hatched, "path", { d: "M-1,1L1,-1M0,5L5,0M4,6L6,4", stroke: colours.line });
  const shade = make(shared, "linearGradient", { id: "shade" });
  [0, 1].forEach((at) => make(shade, "stop",
    { offset: at, "stop-color": `rgb(${colours.influence})`, "stop-opacity": at }));
  make(svg, "rect", { width, height, fill: colours.paper });
  for (const picture of pictures) {
    const copy = new infoflow.Copy(picture, make(svg, "g", {}), left, top);
    for (const part of picture.toSave()) {
      copy.y = top + (part.matches("h3") ? 0 : skipped(picture)); // what is not saved leaves no gap
      copy.add(part);
    }
  }
  return svg;
};

infoflow.save = async function (kind, pictures, name) {
  const svg = infoflow.draw(pictures), text = new XMLSerializer().serializeToString(svg);
  let blob = new Blob([text], { type: "image/svg+xml" });
  if (kind === "png") {
    const image = new Image(), canvas = document.createElement("canvas"), scale = 2;
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await image.decode();
    canvas.width = scale * svg.getAttribute("width");
    canvas.height = scale * svg.getAttribute("height");
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  }
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${name}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};

Object.assign(infoflow.Picture.prototype, {
  buildSaving(bar) {
    bar.selectAll("button.save").data(["png", "svg"]).join("button").attr("type", "button")
      .attr("class", "save").text((kind) => kind.toUpperCase())
      .attr("title", (kind) => `save what is seen as ${kind.toUpperCase()}`)
      .on("click", (_, kind) => infoflow.save(kind, this.beside ? this.beside() : [this],
        "information-flow"));
  },

  toSave() {
    return [...this.box.node().children].filter((part) => !part.matches("details, .notes, .columns"))
      .concat(this.panels().map((panel) => panel.figure.node()));
  },
});
