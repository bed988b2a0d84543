"""Tables: their files, their cells, how columns become numbers, and how that is fitted."""
