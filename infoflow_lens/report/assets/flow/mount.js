infoflow.mount = function (id, css) {
  for (const root of document.querySelectorAll(`[data-infoflow="${id}"]`)) {
    if (root.shadowRoot) continue;
    const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
    const all = window.infoflowPictures = window.infoflowPictures || [];
    const made = new (data.aligned ? infoflow.Pair : infoflow.Picture)(root, data, css, all.length);
    const pictures = made.pictures || [made];
    all.push(pictures[0]);
    made.ready.catch((error) => {
      pictures[0].status.text(`This picture cannot be shown: ${error.message}`);
    });
  }
};
