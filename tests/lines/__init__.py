"""Session lines: beats, signals and hints, with real connections and real processes."""
