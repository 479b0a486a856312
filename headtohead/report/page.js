window.addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
});

function offer(view, axes, box) {
  const buttons = Object.entries(axes).map(([axis, words]) => {
    const choice = document.createElement("button");
    choice.type = "button";
    choice.className = "switch";
    choice.textContent = words;
    choice.addEventListener("click", () => { view.signal("axis", axis).run(); show(); });
    return [axis, choice];
  });
  const show = () => buttons.forEach(([axis, choice]) =>
    choice.setAttribute("aria-pressed", String(view.signal("axis") === axis)));
  box.append(...buttons.map(([, choice]) => choice));
  show();
}

for (const node of document.querySelectorAll("script.definition")) {
  const target = node.dataset.target, definition = JSON.parse(node.textContent);
  const { view } = await window.vegaEmbed("#" + target, definition, { actions: false, renderer: "svg" });
  const axes = definition.usermeta?.axes ?? {}, box = document.querySelector(`.axes[data-for="${target}"]`);
  if (box && Object.keys(axes).length > 1) offer(view, axes, box);
}
root.dataset.drawn = "all";
