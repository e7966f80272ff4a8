// Icons, all from Lucide (https://lucide.dev): only those that are named here reach the page.
import { h } from "preact";
import { ArrowDownRight, ArrowRight, ArrowUpRight, Cpu, Database, Layers, Monitor, Moon, Pause, Pin, Play, Search, Sun, TrendingUp, WifiOff } from "lucide";

const ICONS = {
  down: ArrowDownRight, flat: ArrowRight, up: ArrowUpRight, rollout: Cpu, dataflow: Database, fleet: Layers, trainer: TrendingUp,
  dark: Moon, light: Sun, system: Monitor, pause: Pause, play: Play, pin: Pin, search: Search, away: WifiOff,
};

export function Icon({ name }) {
  return h("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, ICONS[name].map(([tag, attributes]) => h(tag, attributes)));
}
