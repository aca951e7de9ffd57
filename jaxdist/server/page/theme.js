// Light, dark, or as the system has it.

const STORE = "jaxdist-theme";
const THEMES = ["system", "light", "dark"];

export function startTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const chosen = () => localStorage.getItem(STORE) ?? "system";
  const apply = () => {
    const isDark = chosen() === "system" ? dark.matches : chosen() === "dark";
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    button.title = `Colours: ${chosen() === "system" ? "as the system" : chosen()}`;
    button.setAttribute("aria-label", button.title);
  };
  button.addEventListener("click", () => {
    localStorage.setItem(STORE, THEMES[(THEMES.indexOf(chosen()) + 1) % THEMES.length]);
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
}
