"""A backtest: forecasts from several origins within known data, scored and drawn against what came."""
