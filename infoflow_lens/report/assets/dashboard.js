// Sorting of tables, and from a head to its evidence. Stands alone: a page may have no picture.
(function () {
  "use strict";
  const value = (row, column) => row.cells[column].dataset.value;
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = [...body.rows].sort((a, b) => {
          const x = value(a, column), y = value(b, column);
          if (x === "" || y === "") return (x === "") - (y === ""); // what is missing comes last
          const order = Number.isNaN(Number(x)) || Number.isNaN(Number(y))
            ? x.localeCompare(y) : Number(x) - Number(y);
          return up ? order : -order;
        });
        body.append(...rows);
      });
    });
  }

  const data = document.getElementById("examples");
  if (!data) return;
  const examples = JSON.parse(data.textContent), place = document.querySelector(".evidence");
  const add = (parent, tag, text, className) => {
    const made = parent.appendChild(document.createElement(tag));
    if (text) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const root = document.querySelector("[data-infoflow]");
  const picture = () => (window.infoflowPictures || []).find((p) => p.root === root);

  function open(layer, head, sequence, query) {
    const shown = picture();
    if (!shown) return;
    shown.show(sequence).then(() => {
      shown.select(layer, query);
      shown.open([layer, head]);
      root.scrollIntoView({ block: "start" });
    });
  }

  function show(row) {
    const [layer, head] = [0, 1].map((column) => Number(value(row, column)));
    for (const other of row.parentNode.rows) other.removeAttribute("aria-selected");
    row.setAttribute("aria-selected", "true");
    place.replaceChildren();
    add(place, "h3", `Layer ${layer}, head ${head}: where it attends most`);
    const found = examples[`${layer}.${head}`] || [], shown = picture();
    const inputs = shown ? shown.data.inputs : [];
    const rows = found.filter(([sequence]) => sequence < inputs.length);
    if (!rows.length) {
      add(place, "p", "None among the shown sequences: it attends to its own position, or weights "
        + "were not measured.", "soft");
      return;
    }
    const list = add(place, "ol");
    for (const [sequence, query, key, weight] of rows) {
      const item = add(list, "li"), tokens = inputs[sequence].tokens;
      const line = add(item, "span", "", "context");
      for (let t = Math.max(0, Math.min(query, key) - 3); t <= Math.max(query, key) + 1; t++) {
        if (t >= tokens.length) break;
        if (t > Math.min(query, key) + 4 && t < Math.max(query, key) - 4) {
          if (t === Math.min(query, key) + 5) add(line, "span", " … ");
          continue;
        }
        add(line, "span", tokens[t], t === query ? "token query" : t === key ? "token key" : "token");
      }
      add(item, "span", ` position ${query} reads ${key} with ${weight} of its weight; sequence `
        + `${sequence + 1} `, "soft");
      const button = add(item, "button", "pattern and set");
      button.type = "button";
      button.addEventListener("click", () => open(layer, head, sequence, query));
    }
  }

  for (const row of document.querySelectorAll(".pick tbody tr")) {
    row.tabIndex = 0;
    row.addEventListener("click", () => show(row));
    row.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      show(row);
    });
  }
})();
