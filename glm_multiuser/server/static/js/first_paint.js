/** The chosen theme, before anything is painted: modules run too late for that. */

(() => {
  try {
    const { theme } = JSON.parse(localStorage.getItem("glm-multiuser.settings"));
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Nothing kept, or nothing readable: the system's theme it is.
  }
})();
