"""Graph in, graph out: the view of operators, the pattern language, the rules and the order they run in."""
