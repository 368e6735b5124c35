// Moves the stored frames of rc_lib.explore. One copy per page; asks no host for anything.
(() => {
  "use strict";
  const figures = new Map();
  const spoken = new WeakMap();

  const place = (data, inputs) =>
    data.controls.reduce((at, control, i) => at * control.texts.length + chosen(inputs[i]), 0);

  const chosen = (input) => (input.type === "checkbox" ? Number(input.checked) : Number(input.value));

  function show(root, at) {
    const { data, picture } = figures.get(root);
    picture.src = `data:${data.mime};base64,${data.frames[data.grid[at]]}`;
    picture.alt = data.alts[at];
  }

  function say(root, text) {
    // Only when the reader pauses: a screen reader should not read out every step of a drag.
    clearTimeout(spoken.get(root));
    spoken.set(root, setTimeout(() => { root.querySelector(".rc-explore-spoken").textContent = text; }, 600));
  }

  function update(root, aloud) {
    const { data, inputs, outputs } = figures.get(root);
    data.controls.forEach((control, i) => {
      const text = control.texts[chosen(inputs[i])];
      outputs[i].textContent = inputs[i].tagName === "SELECT" ? "" : text;
      if (inputs[i].type === "range") inputs[i].setAttribute("aria-valuetext", text);
    });
    const at = place(data, inputs);
    show(root, at);
    if (aloud) say(root, data.alts[at]);
  }

  function start(root) {
    const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
    const inputs = [...root.querySelectorAll("input, select")];
    const outputs = [...root.querySelectorAll("output")];
    figures.set(root, { data, inputs, outputs, picture: root.querySelector("img") });
    root.addEventListener("input", () => update(root, true));
    root.querySelector(".rc-explore-controls").hidden = false;
    root.classList.add("rc-explore-ready");
    update(root, false);
  }

  const all = (act) => figures.forEach((_, root) => act(root));
  const ready = () => document.querySelectorAll(".rc-explore").forEach(start);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", ready);
  else ready();
  // A browser that comes back to the page may have kept the controls' places, but not the pictures.
  window.addEventListener("pageshow", () => all((root) => update(root, false)));
  window.addEventListener("beforeprint", () => all((root) => show(root, figures.get(root).data.default)));
  window.addEventListener("afterprint", () => all((root) => update(root, false)));
})();
