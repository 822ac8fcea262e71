infoflow.mount = function (id, css) {
  for (const root of document.querySelectorAll(`[data-infoflow="${id}"]`)) {
    if (root.shadowRoot) continue;
    const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
    const picture = new infoflow.Picture(root, data, css);
    (window.infoflowPictures = window.infoflowPictures || []).push(picture);
    picture.ready.catch((error) => {
      picture.status.text(`This picture cannot be shown: ${error.message}`);
    });
  }
};
