"""The linear part of classification and regression: features that nobody trains, and a ridge on them."""
