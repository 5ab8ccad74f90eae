/** Builds the page. */

import { translate } from "./i18n.js";
import { live } from "./live.js";
import { notify } from "./notices.js";
import { Panel } from "./panel.js";
import { settings } from "./settings.js";
import { SettingsDialog } from "./settings_dialog.js";
import { kept } from "./store.js";
import { Workspace } from "./workspace.js";

settings.addEventListener("change", showSettings);
showSettings();
// The settings were read before there were listeners.
kept.troubles.forEach(notify);
kept.addEventListener("trouble", ({ detail }) => notify(detail));

const workspace = new Workspace();
const dialog = new SettingsDialog();
new Panel((id) => workspace.find(id));
live.start();

document.querySelector("#add").addEventListener("click", () => workspace.add());
document.querySelector("#open-settings").addEventListener("click", () => dialog.open());
document.addEventListener("open-settings", () => dialog.open());

const panelButton = document.querySelector("#toggle-live");
let panelShown = kept.read("panel") !== false;
panelButton.addEventListener("click", () => {
  panelShown = !panelShown;
  kept.write("panel", panelShown);
  showPanel(panelShown);
});
showPanel(panelShown);

function showPanel(shown) {
  document.body.toggleAttribute("data-no-panel", !shown);
  panelButton.setAttribute("aria-expanded", shown);
}

function showSettings() {
  const { theme } = settings.values;
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  translate();
}
