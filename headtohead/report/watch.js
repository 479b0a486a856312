// Polls the study's state every few seconds and shows it; all strings are inserted as text, never as HTML.
const find = (id) => document.getElementById(id);
const make = (tag, words = "", kind = "") => {
  const node = document.createElement(tag);
  node.textContent = words;
  if (kind) node.className = kind;
  return node;
};
let axis = "tokens", latest = null;

function button(words, pressed, action) {
  const node = make("button", words, "switch");
  node.type = "button";
  node.setAttribute("aria-pressed", String(pressed));
  node.addEventListener("click", action);
  return node;
}

function curves(contests) {
  const axes = [...new Set(contests.flatMap((contest) => contest.axes))];
  if (axes.length && !axes.includes(axis)) axis = axes[0];
  find("axes").replaceChildren(...axes.map((name) =>
    button(name === "flops" ? "FLOPs" : name, name === axis, () => { axis = name; show(latest); })));
  const box = find("curves");
  while (box.children.length > contests.length) box.lastChild.remove();
  contests.forEach((contest, place) => {
    if (!box.children[place]) {
      const figure = make("figure");
      figure.append(make("figcaption"), make("img", "", "curve"));
      box.append(figure);
    }
    const [caption, image] = box.children[place].children;
    const drawn = contest.axes.includes(axis);
    caption.textContent = contest.title + (drawn ? ": training loss so far" : ": nothing logged yet");
    image.hidden = !drawn;
    image.alt = `learning curves, ${contest.title}`;
    const source = `/curves/${place}/${axis}/${theme()}.svg?${contest.version}`;
    if (drawn && image.getAttribute("src") !== source) image.setAttribute("src", source);
  });
}

function show(state) {
  find("trouble").textContent = state?.trouble ?? state?.waiting ?? "";
  find("progress").hidden = !state?.counts;
  if (state?.waiting) document.title = find("name").textContent = "Waiting for a study";
  if (!state?.counts) return;
  document.title = `${Math.floor(100 * state.share)} % – ${state.name}`;
  find("name").textContent = state.name;
  find("headline").textContent = state.headline;
  find("report").hidden = !state.report;
  const { all, ...counts } = state.counts;
  find("counts").replaceChildren(...Object.entries(counts).map(([name, count]) =>
    make("span", `${count} ${name}`, "chip")), make("span", `of ${all} runs`, "quiet"));
  find("share").value = state.share;
  find("left").textContent = `${Math.floor(100 * state.share)} % trained, ${state.left}`;
  find("sentences").replaceChildren(...state.sentences.map((row) => make("li", row.words, row.verdict)));
  find("early").textContent = state.left === "finished" ? "" : "Verdicts appear when all planned runs have finished.";
  find("active").replaceChildren(...state.active.map((run) => {
    const line = make("tr");
    line.append(make("td", run.title), make("td", run.state), make("td", run.words));
    return line;
  }));
  curves(state.contests);
}

async function follow() {
  let pause = 3;
  try {
    const answer = await fetch("/state.json");
    latest = await answer.json();
    pause = latest.again_after ?? pause;
    show(latest);
  } catch {
    find("trouble").textContent = "no response: h2h watch has stopped";
  }
  setTimeout(follow, 1000 * pause);
}

themed = () => show(latest);
follow();
