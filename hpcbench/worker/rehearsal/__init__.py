"""Steps whose computation is timed sleeps: another machine, rehearsed here with real communication."""
