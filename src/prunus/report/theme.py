"""Colours and type, once: the plots are drawn in the light palette, and the page swaps each colour for a variable.

The series colours follow Okabe and Ito's set for colour-blind readers, darkened or lightened to a contrast of at least
3:1 on their ground; every palette entry is a distinct hex string, because that is how it is found in an SVG.
"""

PALETTE: dict[str, tuple[str, str]] = {  # role: (light, dark)
    "paper": ("#fffffe", "#16191d"),
    "ink": ("#1c2127", "#e4e7ea"),
    "muted": ("#5d6771", "#9ba5af"),
    "line": ("#e2e5e8", "#2e343a"),
    "track": ("#dde1e5", "#363d44"),
    "s1": ("#0b6cae", "#5fb4ee"),
    "s2": ("#c8500a", "#f5935a"),
    "s3": ("#0a8463", "#3fc59d"),
    "s4": ("#9c4f8b", "#dd90c6"),
    "s5": ("#a97a00", "#e2b53e"),
    "s6": ("#3d7f95", "#93cfe4"),
    "s7": ("#6b5bb0", "#afa2f0"),
}
LIGHT = {role: pair[0] for role, pair in PALETTE.items()}
SERIES = [LIGHT[f"s{i}"] for i in range(1, 8)]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def _variables(dark: bool) -> str:
    return "".join(f"--{role}:{pair[dark]};" for role, pair in PALETTE.items())


CSS = (
    f":root{{color-scheme:light dark;{_variables(False)}--page:#f6f7f8;--good:#0a7a5c;--bad:#b8400a}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(True)}"
    "--page:#0e1013;--good:#3fc59d;--bad:#f5935a}}"
    f"body{{font-family:{FONT}}}"
    """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;background:var(--page)}
body{margin:0;color:var(--ink);background:var(--page);font-size:16px;line-height:1.5;
  font-variant-numeric:tabular-nums lining-nums}
main{max-width:960px;margin:0 auto;padding:40px 24px 64px}
header{margin-bottom:28px}
.kicker{color:var(--muted);font-size:.875rem;margin:0 0 6px;overflow-wrap:anywhere}
h1{font-size:1.75rem;line-height:1.25;font-weight:650;letter-spacing:-.012em;margin:0;text-wrap:balance;
  overflow-wrap:anywhere}
h2{font-size:1.125rem;line-height:1.3;font-weight:650;margin:0 0 4px;overflow-wrap:anywhere}
h3{font-size:1rem;font-weight:650;margin:0 0 4px}
p{margin:0 0 12px}.said{margin:12px 0 0}
.note{color:var(--muted);font-size:.875rem;max-width:70ch;overflow-wrap:anywhere}
.card{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:20px 24px;margin:0 0 16px}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:1px;padding:0;overflow:hidden;
  background:var(--line)}
.facts div{background:var(--paper);padding:16px 20px}
.facts dt{color:var(--muted);font-size:.8125rem}
.facts dd{margin:0;font-size:1.5rem;line-height:1.3;font-weight:600;letter-spacing:-.01em}
.facts small{display:block;color:var(--muted);font-size:.8125rem;font-weight:400;letter-spacing:0}
dl{margin:0}
.scroll{overflow-x:auto;margin:0 -24px;padding:0 24px}
table{border-collapse:collapse;width:100%;font-size:.9375rem}
th,td{padding:7px 0 7px 20px;text-align:right;vertical-align:baseline;border-top:1px solid var(--line);
  white-space:nowrap}
thead th{border-top:0;color:var(--muted);font-weight:500;font-size:.8125rem;vertical-align:bottom}
th:first-child,td:first-child{text-align:left;padding-left:0}
tbody th{font-weight:400;white-space:normal;overflow-wrap:anywhere;min-width:7.5em}
td small{color:var(--muted);font-size:.8125rem}
.names td:not(:first-child),.names th:not(:first-child){text-align:left;white-space:normal;overflow-wrap:anywhere}
.runs thead th{color:var(--ink);font-weight:600;white-space:normal;overflow-wrap:anywhere;min-width:8.5em}
.runs tbody th{color:var(--muted);position:sticky;left:0;background:var(--paper)}
.runs thead th:first-child{position:sticky;left:0;background:var(--paper)}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}
.legend{display:grid;grid-template-columns:auto 1fr;gap:2px 14px;margin-top:14px;font-size:.875rem;
  color:var(--muted)}
.legend dt{color:var(--ink)}.legend dd{margin:0}
figure{margin:8px 0 0}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-family:inherit;font-variant-numeric:tabular-nums}
.narrow{display:none}
nav{font-size:.875rem;margin-top:12px}nav a{color:var(--s1);margin-right:16px;overflow-wrap:anywhere}
section.run{margin-top:48px;padding-top:24px;border-top:2px solid var(--line)}
section.run>header h2{font-size:1.375rem}
details{border-top:1px solid var(--line)}
details:first-child{border-top:0}
.folds{padding:4px 24px}
summary{cursor:pointer;padding:12px 0;font-weight:600;font-size:.9375rem}
summary span{color:var(--muted);font-weight:400}
details>:last-child{margin-bottom:16px}
ul{margin:0;padding-left:20px}li{margin:4px 0;overflow-wrap:anywhere}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.875em;overflow-wrap:anywhere}
footer{color:var(--muted);font-size:.8125rem;margin-top:32px}
@media (max-width:640px){
  main{padding:24px 14px 40px}h1{font-size:1.375rem}
  .card{padding:16px;border-radius:8px}.facts{grid-template-columns:1fr 1fr;padding:0}.facts div{padding:12px 16px}
  .facts dd{font-size:1.25rem}.folds{padding:2px 16px}
  .scroll{margin:0 -16px;padding:0 16px}th,td{padding-left:9px}table{font-size:.8125rem}
  tbody th{min-width:5em}.runs thead th{min-width:7.5em}
  td{white-space:normal}td small{display:block}
  .facts div:last-child:nth-child(odd){grid-column:1/-1}
  .legend{grid-template-columns:1fr}.legend dd{margin-bottom:6px}
  .wide{display:none}.narrow{display:block}
}
@media print{
  :root{--page:#fff}body{font-size:10.5pt}main{max-width:none;padding:0}
  .card,figure,tr{break-inside:avoid}section.run{break-before:page;border:0;margin:0}
  .wide{display:block}.narrow{display:none}
  details::details-content{content-visibility:visible;block-size:auto}nav{display:none}
  .scroll{overflow:visible}th,td{padding-left:10px}
}
"""
)
