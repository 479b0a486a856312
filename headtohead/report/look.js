// Draws the inspection; all strings are inserted as text, never as HTML.
const make = (tag, text = "", kind = "") => {
  const node = document.createElement(tag);
  node.textContent = text;
  if (kind) node.className = kind;
  return node;
};
const drawn = (tag, values) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(values)) node.setAttribute(key, value);
  return node;
};
const visible = (token) => token === "\n" ? "↵\n" : token;
const percent = (share) => `${100 * share >= 9.5 || share === 0 ? (100 * share).toFixed(0) : (100 * share).toPrecision(2)} %`;
// The square root makes small weights visible: uniform weight on 128 tokens is below 1 %. One scale for all heads and runs.
function paint(node, weight) {
  const shade = Math.min(1, Math.sqrt(Math.abs(weight)));
  node.style.setProperty("--share", shade.toFixed(3));
  node.classList.toggle("negative", weight < 0);
  node.classList.toggle("strong", shade > 0.62);
}
for (const node of document.querySelectorAll(".legend [data-share]")) paint(node, Number(node.dataset.share));

function unpacked(layer) {
  const bytes = Uint8Array.from(atob(layer.weights), (letter) => letter.charCodeAt(0));
  return [new DataView(bytes.buffer), bytes.length / 2 / layer.heads];
}

class Sight {
  constructor(box, data) {
    this.box = box; this.data = data; this.time = data.tokens.length;
    this.query = this.kept = data.place; this.head = null;
    this.maps = data.layers.map((layer) => layer.heads ? unpacked(layer) : null);
    this.cards = [];
    this.text = box.querySelector(".text");
    this.text.classList.toggle("apart", data.apart);
    this.tokens = this.written(this.text);
    for (const [number, layer] of data.layers.entries()) this.build(number, layer);
    this.circles();
    this.text.addEventListener("pointerover", (event) => this.over(event, false));
    this.text.addEventListener("click", (event) => this.over(event, true));
    this.text.addEventListener("pointerleave", () => choose(this, this.kept));
    this.text.addEventListener("keydown", (event) => this.key(event));
  }
  written(place) {
    const spans = this.data.tokens.map((token, index) => {
      const span = make("span", visible(token), this.data.relevant[index] ? "token relevant" : "token");
      span.dataset.index = index;
      return span;
    });
    place.append(...spans);
    return spans;
  }
  build(number, layer) {
    const place = this.box.querySelector(".layers"), signed = layer.signed ? ", signed" : "";
    place.append(make("h2", `layer ${number + 1}: ${layer.mechanism}${signed}`));
    if (!layer.heads) {
      place.append(make("p", `${layer.mechanism} has no attention map; only the prediction is shown.`, "quiet nomap"));
      return;
    }
    const heads = make("div", "", "heads");
    for (let head = 0; head < layer.heads; head++) {
      const card = make("button", "", "head"), title = make("b", `head ${head + 1}`), share = make("i");
      const small = make("span", "", "small");
      card.type = "button";
      small.classList.toggle("apart", this.data.apart);
      title.append(share);
      card.append(title, small);
      card.addEventListener("click", () => {
        this.head = this.head && this.head[0] === number && this.head[1] === head ? null : [number, head];
        this.show();
      });
      this.cards.push({ card, share, number, head, tokens: this.written(small) });
      heads.append(card);
    }
    place.append(heads);
  }
  row(number, head) {
    const [view, size] = this.maps[number], found = new Float64Array(this.time), query = this.query;
    const first = head * size + (this.data.causal ? query * (query + 1) / 2 : query * this.time);
    const seen = this.data.causal ? query + 1 : this.time, scale = this.data.layers[number].largest / 32767;
    for (let key = 0; key < seen; key++) found[key] = view.getInt16(2 * (first + key), true) * scale;
    return found;
  }
  over(event, keep) {
    const index = event.target.dataset?.index;
    if (index === undefined) return;
    if (keep) this.kept = Number(index);
    choose(this, Number(index));
  }
  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -this.time, End: this.time }[event.key];
    if (event.key === "Escape") { this.head = null; this.kept = this.data.place; }
    else if (step) this.kept = Math.max(0, Math.min(this.time - 1, this.query + step));
    else return;
    event.preventDefault();
    choose(this, this.kept);
  }
  relevantShare(row) {
    let total = 0, relevant = 0;
    row.forEach((weight, index) => { total += Math.abs(weight); if (this.data.relevant[index]) relevant += Math.abs(weight); });
    return total ? relevant / total : 0;
  }
  show() {
    const mean = new Float64Array(this.time), marked = this.data.relevant.some(Boolean);
    for (const card of this.cards) {
      const row = this.row(card.number, card.head);
      row.forEach((weight, index) => { mean[index] += weight / this.cards.length; });
      this.color(card.tokens, row);
      const best = row.reduce((top, weight, index) => Math.abs(weight) > Math.abs(row[top]) ? index : top, 0);
      card.share.textContent = marked ? `${percent(this.relevantShare(row))} relevant` : `most ${percent(Math.abs(row[best]))}`;
      card.card.setAttribute("aria-pressed", String(this.head !== null && this.head[0] === card.number && this.head[1] === card.head));
    }
    this.color(this.tokens, this.head ? this.row(...this.head) : mean);
    const shown = this.head ? `layer ${this.head[0] + 1}, head ${this.head[1] + 1}` : "mean over all heads and layers";
    const token = visible(this.data.tokens[this.query]).trim() || "␣";
    this.box.querySelector(".status").textContent = this.cards.length
      ? `Attention of token ${this.query + 1} of ${this.time}, “${token}”: ${shown}.` : `Token ${this.query + 1} of ${this.time}, “${token}”.`;
    this.answers();
    for (const dot of this.box.querySelectorAll(".dot"))
      dot.classList.toggle("query", Number(dot.dataset.index) === this.query);
  }
  color(spans, row) {
    spans.forEach((span, index) => {
      paint(span, row[index]);
      span.classList.toggle("query", index === this.query);
      span.classList.toggle("unseen", this.data.causal && index > this.query);
    });
  }
  answers() {
    const every = this.data.guesses.length > 1, body = this.box.querySelector(".guesses tbody");
    body.replaceChildren(...this.data.guesses[every ? this.query : 0].map(([words, share]) => {
      const row = document.createElement("tr"), bar = make("span", "", "bar"), cell = document.createElement("td");
      bar.style.width = `${100 * share}%`;
      cell.append(bar);
      row.append(make("td", words.replaceAll("\n", "↵").replaceAll(" ", "␣")), cell, make("td", percent(share), "n"));
      return row;
    }));
  }
  circles() {
    const place = this.box.querySelector(".phases");
    if (!this.data.phases.length) return;
    place.append(make("h2", "phases"), make("p", "One circle per coordinate: each dot is the phase of a token, the line their mean; r = 1 if all phases are equal. Shown are the coordinates that coupling synchronizes most.", "quiet"));
    const rows = make("div", "", "circles");
    for (const [coordinate] of this.data.phases[0].angles.entries()) for (const stage of this.data.phases) {
      const angles = stage.angles[coordinate], figure = document.createElement("figure");
      const svg = drawn("svg", { viewBox: "-1.75 -1.75 3.5 3.5", role: "img" });
      const x = angles.reduce((sum, angle) => sum + Math.cos(angle), 0) / angles.length;
      const y = -angles.reduce((sum, angle) => sum + Math.sin(angle), 0) / angles.length;
      svg.append(drawn("circle", { class: "ring", r: 1 }), drawn("line", { class: "hand", x1: 0, y1: 0, x2: x, y2: y }));
      angles.forEach((angle, index) => {
        svg.append(drawn("circle", { class: "dot", "data-index": index, cx: Math.cos(angle), cy: -Math.sin(angle), r: 0.07 }));
        svg.lastChild.append(drawn("title", {}));
        svg.lastChild.lastChild.textContent = this.data.tokens[index];
        if (angles.length > 24) return;
        const far = 1.2 + 0.42 * index / angles.length, letters = drawn("text", { x: far * Math.cos(angle), y: -far * Math.sin(angle) });
        letters.textContent = visible(this.data.tokens[index]).trim() || "␣";
        svg.append(letters);
      });
      const head = coordinate === 0 ? `${stage.stage}, mean r ${stage.order.toFixed(2)}` : "";
      figure.append(make("figcaption", head), svg, make("figcaption", `r = ${Math.hypot(x, y).toFixed(2)}`));
      rows.append(figure);
    }
    place.append(rows);
  }
}

const data = JSON.parse(document.getElementById("data").textContent);
const sights = [...document.querySelectorAll(".sight")].map((box, place) => new Sight(box, data[place]));
const same = sights.every((sight) => sight.data.tokens.join("\0") === data[0].tokens.join("\0"));
// Models with the same tokens share the selected query.
function choose(sight, query) {
  for (const one of same ? sights : [sight]) {
    one.query = query;
    if (same) one.kept = sight.kept;
    one.show();
  }
}
for (const sight of sights) {
  if (sight.data.phases.length) {
    const wide = sight.data.phases.length;
    sight.box.querySelector(".circles").style.gridTemplateColumns = innerWidth > 760 ? `repeat(${wide}, minmax(0, 1fr))` : "";
  }
  sight.show();
}
root.dataset.drawn = "all";
