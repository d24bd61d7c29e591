"""Shows plans: text grid, figures and tables, SVG, HTML page, trace file.

Everything here is a function of a `Timeline` (simulate.py); nothing plans or times anything itself,
except that `page/retime.js` repeats the timing rule in the browser, where sliders change the costs.
"""
