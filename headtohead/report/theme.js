// The theme follows the system until the button is pressed; charts take their colours from the style sheet.
const root = document.documentElement, lamp = document.getElementById("theme");
const system = window.matchMedia("(prefers-color-scheme: dark)");
const theme = () => root.dataset.theme ?? (system.matches ? "dark" : "light");
let themed = () => {};  // what a page does besides when the theme changes
const turn = () => { lamp.textContent = theme() === "dark" ? "light" : "dark"; themed(); };
lamp.addEventListener("click", () => { root.dataset.theme = theme() === "dark" ? "light" : "dark"; turn(); });
system.addEventListener("change", turn);
turn();

