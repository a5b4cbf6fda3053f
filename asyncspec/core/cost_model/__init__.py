"""What passes, links, rows and jobs cost: estimated from measurements, smoothed, and asked.

``parameters`` holds every constant; ``passes`` estimates a stage's pass times, ``bandwidth`` a
link's, ``pipeline`` the whole pipeline's as a draft node sees it, and ``rows`` answers how many
rows are worth their cost.
"""
