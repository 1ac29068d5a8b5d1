"""Why a model fails beyond its training length: curves by position, their knees and a verdict."""
