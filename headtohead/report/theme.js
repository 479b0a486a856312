// The theme follows the system until the button is pressed; charts use the colors of the style sheet.
const root = document.documentElement, themeButton = document.getElementById("theme");
const system = window.matchMedia("(prefers-color-scheme: dark)");
const theme = () => root.dataset.theme ?? (system.matches ? "dark" : "light");
let themed = () => {};  // hook for pages to react to a theme change
const applyTheme = () => { themeButton.textContent = theme() === "dark" ? "light" : "dark"; themed(); };
themeButton.addEventListener("click", () => { root.dataset.theme = theme() === "dark" ? "light" : "dark"; applyTheme(); });
system.addEventListener("change", applyTheme);
applyTheme();

