import os,sys
os.environ.setdefault("TEMPLATES","/work/wt/k-attn/kernels/templates")
sys.path.insert(0,"/work/wt/harness")
from kern import *
def ctx(dt,h,hkv,d,dv,kind,p,sinks=None,cap=None,window=None,scale=None,block=None,kd=None):
    kd=kd or dt
    q=tensor(dt,["step->T",h,d]); mixed=tensor(kd,["step->T",h,dv])
    st=lambda dd: T(type={"f32":"float"}.get(kd,kd),dtype=kd,heads=hkv,dim=dd)
    s=tensor(sinks,[h]) if sinks else None
    ty=lambda x:{"f32":"float"}.get(x,x)
    params=f"const {ty(dt)}* q, {ty(kd)}* k_state, {ty(kd)}* v_state, "+(f"const {ty(sinks)}* sinks, " if sinks else "")+f"{ty(kd)}* mixed, "+("u8* scratch, " if kind==1 else "")+"const Step* step"
    pp=T(dict(kind=kind,**p))
    return dict(q=q,k_state=st(d),v_state=st(dv),sinks=s,mixed=mixed,scale=scale or d**-0.5,cap=cap,window=window,p=pp,block=block or 32*p["warps"],params=params,kernel="paged_attention")
if __name__=="__main__":
    archs=sys.argv[1:] or ["sm_90a"]
    for a in archs:
        for (name,c) in [
          ("plain",ctx("f32",4,2,33,40,0,dict(warps=4),sinks="f32",cap=30.0,window=7)),
          ("plain",ctx("bf16",4,2,64,64,0,dict(warps=4))),
          ("dec64",ctx("bf16",32,8,64,64,1,dict(warps=8,heads=1,stages=4))),
          ("dec128",ctx("bf16",32,8,128,128,1,dict(warps=8,heads=1,stages=2))),
          ("dec128h8",ctx("f16",32,8,128,128,1,dict(warps=8,heads=8,stages=2),sinks="bf16",cap=50.0,window=100)),
          ("dec256",ctx("bf16",8,4,256,256,1,dict(warps=4,heads=1,stages=2))),
          ("dec128g16",ctx("bf16",32,2,128,128,1,dict(warps=8,heads=1,stages=2))),
          ("pre64",ctx("bf16",32,8,64,64,2,dict(warps=4,row_tiles=2,cols=64))),
          ("pre128",ctx("bf16",32,8,128,128,2,dict(warps=4,row_tiles=2,cols=64))),
          ("pre128b",ctx("bf16",32,8,128,128,2,dict(warps=4,row_tiles=2,cols=32))),
          ("pre128_1",ctx("bf16",32,8,128,128,2,dict(warps=8,row_tiles=1,cols=64),sinks="bf16",cap=50.0,window=100)),
          ("pre256",ctx("bf16",8,4,256,256,2,dict(warps=4,row_tiles=1,cols=32))),
        ]:
            if a=="sm_75" and name!="plain": continue
            print("==",a,name,flush=True)
            compile(render("paged_attention",**c),a)
