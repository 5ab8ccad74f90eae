/** Sets the theme before the first paint; modules run too late for that. */

(() => {
  try {
    const prefix = `glm-multiuser${location.pathname.replace(/\/$/, "")}.`;
    const { theme } = JSON.parse(localStorage.getItem(`${prefix}settings`));
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Nothing stored, or unreadable: the system's theme applies.
  }
})();
