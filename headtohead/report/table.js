// Tables: headings sort, buttons copy, and a table wider than its place shows one block per row.
const words = (cell) => {
  const copy = cell.cloneNode(true);
  for (const part of copy.querySelectorAll(".remark")) part.remove();
  return copy.textContent.replace(/[▲▼]/g, "").replace(/\s+/g, " ").trim();
};
// The number a cell starts with: 1,280, -0.02, 0.50x, 1.2M. Times and shortened numbers have a data-value.
const value = (cell) => {
  const text = cell.dataset.value || words(cell).replace(/−/g, "-").replace(/,(?=\d{3})/g, "");
  const found = /^[+-]?\d[\d.]*(e[+-]?\d+)?/i.exec(text);
  return found ? Number(found[0]) * ({ k: 1e3, M: 1e6, B: 1e9 }[text[found[0].length]] ?? 1) : NaN;
};

function sort(table, column) {
  const headings = [...table.tHead.rows[0].cells], heading = headings[column];
  const sign = heading.ariaSort === "ascending" ? -1 : 1;
  for (const other of headings) other.ariaSort = "none";
  heading.ariaSort = sign > 0 ? "ascending" : "descending";
  const keys = [...table.tBodies[0].rows].map((row) => {
    const cell = row.cells[column], text = words(cell);
    return { row, number: value(cell), text: text === "–" ? "" : text };
  });
  const numeric = keys.some((key) => key.number === key.number);
  // Cells without a value stay at the end in both directions.
  const empty = (key) => numeric ? Number.isNaN(key.number) : !key.text;
  keys.sort((a, b) => empty(a) - empty(b) || (empty(a) ? 0 : sign *
    (numeric ? a.number - b.number : a.text.localeCompare(b.text, undefined, { numeric: true }))));
  table.tBodies[0].append(...keys.map((key) => key.row));
}

const lines = (table) => [...table.rows].map((row) => [...row.cells].map(words));
const right = (table) => [...table.tHead.rows[0].cells].map((cell) => cell.classList.contains("n"));
const special = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "–": "--", "−": "$-$",
  "<": "\\textless{}", ">": "\\textgreater{}", "|": "\\textbar{}" };

const formats = {
  Markdown(table) {
    const [head, ...rows] = lines(table).map((row) =>
      `| ${row.map((text) => text.replace(/[\\|<]/g, "\\$&")).join(" | ")} |`);
    return [head, `|${right(table).map((side) => side ? "---:" : "---").join("|")}|`, ...rows, ""].join("\n");
  },
  LaTeX(table) {
    const [head, ...rows] = lines(table).map((row) =>
      `${row.map((text) => text.replace(/[\\~^–−<>|&%$#_{}]/g, (mark) => special[mark] ?? `\\${mark}`)).join(" & ")} \\\\`);
    const columns = right(table).map((side) => side ? "r" : "l").join("");
    return ["% \\usepackage{booktabs}", `\\begin{tabular}{${columns}}`, "\\toprule", head, "\\midrule", ...rows,
      "\\bottomrule", "\\end{tabular}", ""].join("\n");
  },
};

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // pages opened as files have no clipboard in some browsers
    const box = document.createElement("textarea");
    box.value = text;
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    if (!done) throw new Error("no clipboard");
  }
}

function copyButton(table, name) {
  const button = document.createElement("button"), label = `copy as ${name}`;
  button.type = "button";
  button.className = "switch";
  button.textContent = label;
  button.ariaLive = "polite";
  button.addEventListener("click", async () => {
    button.textContent = await copy(formats[name](table)).then(() => "copied", () => "the browser does not allow copying");
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

function fit() {
  for (const place of document.querySelectorAll(".scroll")) {
    const table = place.querySelector("table");
    table.classList.remove("stacked");
    table.classList.toggle("stacked", place.scrollWidth > place.clientWidth);
  }
}

for (const table of document.querySelectorAll(".scroll > table")) {
  if (!table.tHead) continue;
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    for (const row of table.tBodies[0].rows) if (row.cells[column]) row.cells[column].dataset.label = words(heading);
    if (!heading.textContent) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    button.addEventListener("click", () => sort(table, column));
    heading.ariaSort = "none";
    heading.replaceChildren(button);
  });
  const tools = document.createElement("div");
  tools.className = "tools";
  tools.append(...Object.keys(formats).map((name) => copyButton(table, name)));
  table.parentElement.after(tools);
}
fit();
window.addEventListener("resize", fit);
document.addEventListener("toggle", fit, true);  // a folded table has no width
