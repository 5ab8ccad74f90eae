/** The chosen theme, before anything is painted: modules run too late for that. */

(() => {
  try {
    const prefix = `glm-multiuser${location.pathname.replace(/\/$/, "")}.`;
    const { theme } = JSON.parse(localStorage.getItem(`${prefix}settings`));
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Nothing kept, or nothing readable: the system's theme it is.
  }
})();
