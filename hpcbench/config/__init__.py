"""Configuration: TOML files in, validated and typed values out."""
