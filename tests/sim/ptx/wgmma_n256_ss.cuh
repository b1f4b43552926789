#pragma once
#include "ptx/wgmma.cuh"
